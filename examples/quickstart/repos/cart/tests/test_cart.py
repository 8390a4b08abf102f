import pytest
from cart import Cart


def test_an_empty_cart_costs_nothing():
    assert Cart().total() == 0


def test_the_same_article_is_added_to_its_line():
    cart = Cart()
    cart.add("pen", 120)
    cart.add("pen", 120, quantity=2)
    assert cart.lines["pen"].quantity == 3
    assert cart.subtotal() == 360


def test_a_small_order_pays_shipping():
    cart = Cart()
    cart.add("mug", 900)
    assert cart.total() == 1390


def test_a_large_order_ships_free():
    cart = Cart()
    cart.add("chair", 8900)
    assert cart.total() == 8900


def test_ten_pieces_are_cheaper():
    cart = Cart()
    cart.add("pen", 100, quantity=10)
    assert cart.subtotal() == 950


def test_zero_pieces_are_refused():
    with pytest.raises(ValueError, match="quantity"):
        Cart().add("pen", 100, quantity=0)


def test_a_removed_article_is_not_charged():
    cart = Cart()
    cart.add("mug", 900)
    cart.remove("mug")
    cart.remove("mug")
    assert cart.total() == 0
