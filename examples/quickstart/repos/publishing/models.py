"""Who works at the paper and what they write."""

from dataclasses import dataclass, field

EDITOR = "editor"


@dataclass(frozen=True)
class User:
    name: str
    roles: frozenset = frozenset()
    active: bool = True

    def has(self, role):
        return role in self.roles


@dataclass
class Article:
    author: User
    status: str = "draft"
    approvals: list = field(default_factory=list)
