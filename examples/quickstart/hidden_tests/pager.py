import pytest
from pager import Pager


@pytest.mark.parametrize(("length", "per_page", "pages"), [(10, 5, 2), (9, 3, 3), (20, 10, 2), (4, 4, 1)])
def test_full_pages_are_not_followed_by_an_empty_one(length, per_page, pages):
    assert Pager(range(length), per_page=per_page).count() == pages


def test_an_empty_list_has_no_pages():
    assert list(Pager([], per_page=3)) == []


def test_no_page_is_empty():
    for length in range(1, 30):
        for per_page in range(2, 8):
            pages = list(Pager(range(length), per_page=per_page))
            assert all(page.items for page in pages)
            assert [item for page in pages for item in page.items] == list(range(length))


def test_the_last_full_page_has_no_next():
    assert not Pager(range(10), per_page=5).page(2).has_next


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (6, 2), (11, 3)])
def test_a_last_page_that_is_not_full_counts(length, pages):
    assert Pager(range(length), per_page=5).count() == pages
