import pytest
from cart import Cart


def order(*lines):
    cart = Cart()
    for number, (price, quantity) in enumerate(lines):
        cart.add(f"article-{number}", price, quantity)
    return cart


def test_an_order_of_exactly_fifty_ships_free():
    assert order((5000, 1)).shipping() == 0


def test_several_lines_that_make_exactly_fifty_pay_only_for_the_goods():
    assert order((1500, 2), (1000, 2)).total() == 5000


@pytest.mark.parametrize(("cents", "shipping"), [(1, 490), (4999, 490), (5001, 0), (12000, 0)])
def test_other_orders_pay_as_before(cents, shipping):
    assert order((cents, 1)).shipping() == shipping


def test_an_empty_order_has_no_shipping():
    assert order().shipping() == 0
