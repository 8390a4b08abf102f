"""A small cache that forgets what was not used for longest."""

from collections import OrderedDict

_MISSING = object()


class LRU:
    """At most `size` entries. The front of the dict is the next to go."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("a cache holds at least one entry")
        self.size = size
        self.hits = 0
        self.misses = 0
        self._entries = OrderedDict()

    def __len__(self):
        return len(self._entries)

    def __contains__(self, key):
        return key in self._entries

    def get(self, key, default=None):
        """The value of a key, which is now the most recently used one."""
        value = self._entries.get(key, _MISSING)
        if value is _MISSING:
            self.misses += 1
            return default
        self.hits += 1
        self._entries.move_to_end(key, last=False)
        return value

    def put(self, key, value):
        """Store a value; the entry unused for longest makes room."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)

    def clear(self):
        """Forget all entries; the counters stay."""
        self._entries.clear()
