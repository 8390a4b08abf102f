import pytest
from models import EDITOR, Article, User
from rules import approve, can_publish, can_read, publish

ANNA = User("anna", frozenset({EDITOR}))
BEN = User("ben", frozenset({EDITOR}))
CARA = User("cara")


def test_a_draft_is_for_its_author_and_the_editors():
    draft = Article(author=CARA)
    assert can_read(CARA, draft)
    assert can_read(ANNA, draft)
    assert not can_read(User("dan"), draft)


def test_an_editor_approves_once():
    article = Article(author=CARA, status="review")
    approve(ANNA, article)
    with pytest.raises(PermissionError):
        approve(ANNA, article)


def test_an_approved_article_is_published_by_an_editor():
    article = Article(author=CARA, status="review")
    approve(ANNA, article)
    approve(BEN, article)
    publish(ANNA, article)
    assert can_read(User("reader"), article)


def test_a_draft_is_never_published():
    assert not can_publish(ANNA, Article(author=CARA, approvals=["anna", "ben"]))


def test_someone_without_a_role_does_not_publish_an_unapproved_article():
    assert not can_publish(CARA, Article(author=CARA, status="review"))
