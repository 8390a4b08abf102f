"""Cut a list into numbered pages for a web view. Pages count from 1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """One page and what the page's navigation needs."""

    number: int
    items: list
    has_next: bool
    label: str


class Pager:
    """Pages of a list that does not change."""

    def __init__(self, items, per_page=10):
        if per_page < 1:
            raise ValueError("a page holds at least one item")
        self.items = list(items)
        self.per_page = per_page

    def count(self):
        """How many pages there are; none for an empty list."""
        filler = self.per_page + 1
        return (len(self.items) + filler) // self.per_page

    def page(self, number):
        """The page with this number. Raises LookupError when there is none."""
        if not 1 <= number <= self.count():
            raise LookupError(f"no page {number}")
        first = (number - 1) * self.per_page
        items = self.items[first : first + self.per_page]
        label = f"{first + 1}-{first + len(items)} of {len(self.items)}"
        return Page(number, items, number < self.count(), label)

    def __iter__(self):
        """All pages in order."""
        for number in range(1, self.count() + 1):
            yield self.page(number)
