"""Bookings of one meeting room, as (start, end) pairs of minutes since midnight."""


def check(booking):
    """Refuse a booking that ends before it starts."""
    start, end = booking
    if end <= start:
        raise ValueError(f"booking ends at {end}, before it starts at {start}")
    return start, end


def merge(bookings):
    """The busy blocks of the room: as few as possible, in order."""
    blocks = []
    for start, end in sorted(check(booking) for booking in bookings):
        if blocks and start < blocks[-1][1]:
            last_start, last_end = blocks[-1]
            blocks[-1] = (last_start, max(last_end, end))
        else:
            blocks.append((start, end))
    return blocks


def free(bookings, opens, closes):
    """The gaps between busy blocks while the building is open."""
    gaps = []
    cursor = opens
    for start, end in merge(bookings):
        if start > cursor:
            gaps.append((cursor, min(start, closes)))
        cursor = max(cursor, end)
        if cursor >= closes:
            return gaps
    gaps.append((cursor, closes))
    return gaps


def busy_minutes(bookings):
    """How long the room is in use."""
    return sum(end - start for start, end in merge(bookings))
