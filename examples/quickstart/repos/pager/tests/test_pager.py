import pytest
from pager import Pager


def test_the_last_page_holds_the_rest():
    pager = Pager(range(1, 12), per_page=5)
    assert pager.count() == 3
    assert pager.page(3).items == [11]
    assert pager.page(3).label == "11-11 of 11"


def test_the_first_page_has_a_next_one():
    page = Pager("abcdefg", per_page=3).page(1)
    assert page.items == ["a", "b", "c"]
    assert page.has_next
    assert page.label == "1-3 of 7"


def test_pages_below_one_do_not_exist():
    with pytest.raises(LookupError):
        Pager("abc").page(0)


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Pager("abc", per_page=0)
