"""A basket and what it costs. All amounts are in cents."""

from dataclasses import dataclass, field

SHIPPING = 490
FREE_SHIPPING_FROM = 5000
BULK_QUANTITY = 10
BULK_PERCENT = 5


@dataclass
class Line:
    """Some pieces of one article."""

    sku: str
    unit_price: int
    quantity: int

    def total(self):
        """Price of the line after the bulk discount, rounded down."""
        price = self.unit_price * self.quantity
        if self.quantity >= BULK_QUANTITY:
            price -= price * BULK_PERCENT // 100
        return price


@dataclass
class Cart:
    """The lines of one order, by article."""

    lines: dict = field(default_factory=dict)

    def add(self, sku, unit_price, quantity=1):
        """Put pieces in; the same article again adds to its line."""
        if quantity < 1:
            raise ValueError("quantity must be at least 1")
        line = self.lines.get(sku)
        if line is None:
            self.lines[sku] = Line(sku, unit_price, quantity)
        else:
            line.quantity += quantity

    def remove(self, sku):
        """Take an article out; unknown ones are ignored."""
        self.lines.pop(sku, None)

    def subtotal(self):
        """Worth of the goods."""
        return sum(line.total() for line in self.lines.values())

    def shipping(self):
        """What sending this order costs."""
        if not self.lines:
            return 0
        if self.subtotal() > FREE_SHIPPING_FROM:
            return 0
        return SHIPPING

    def total(self):
        """What the customer pays."""
        return self.subtotal() + self.shipping()
