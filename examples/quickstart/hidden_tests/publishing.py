import pytest
from models import EDITOR, Article, User
from rules import approve, can_publish, publish

ANNA = User("anna", frozenset({EDITOR}))
BEN = User("ben", frozenset({EDITOR}))
CARA = User("cara", frozenset({"writer"}))


def test_an_editor_alone_does_not_publish():
    assert not can_publish(ANNA, Article(author=CARA, status="review"))


def test_one_approval_of_two_is_not_enough():
    article = Article(author=CARA, status="review")
    approve(BEN, article)
    with pytest.raises(PermissionError):
        publish(ANNA, article)
    assert article.status == "review"


def test_the_author_does_not_publish_an_approved_article():
    assert not can_publish(CARA, Article(author=CARA, status="review", approvals=["anna", "ben"]))


def test_an_editor_publishes_an_approved_article():
    article = Article(author=CARA, status="review", approvals=["anna", "ben"])
    publish(ANNA, article)
    assert article.status == "published"


def test_an_editor_who_left_publishes_nothing():
    gone = User("eve", frozenset({EDITOR}), active=False)
    assert not can_publish(gone, Article(author=CARA, status="review", approvals=["anna", "ben"]))
