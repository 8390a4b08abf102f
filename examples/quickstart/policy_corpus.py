"""Invented dialogues in the *form* of acting on a quickstart task: names to copy, lines to read, one edit to make.

The edit of each dialogue is drawn uniformly among the operators on the lines shown, so nothing here teaches which edit
is right. Pure Python, seeded: the same seed gives the same dialogues on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SYSTEM_PROMPT = "Fix the bug."
"""What the quickstart's run file gives pi as --system-prompt."""

_OPERATORS = (
    ("<", "<="),
    (">", ">="),
    ("==", "!="),
    (" + ", " - "),
    (" and ", " or "),
    ("min(", "max("),
    (" 0", " 1"),
    ("True", "False"),
)
SWAPS = {old: new for pair in _OPERATORS for old, new in (pair, pair[::-1])}
"""Operator → its partner, as the two sides of a sed substitution."""

_ALONE = {
    "<": re.compile(r"(?<![<=-])<(?![<=])"),
    ">": re.compile(r"(?<![>=-])>(?![>=])"),
    "min(": re.compile(r"(?<![\w.])min\("),
    "max(": re.compile(r"(?<![\w.])max\("),
    " 0": re.compile(r" 0(?![\w.])"),
    " 1": re.compile(r" 1(?![\w.])"),
    "True": re.compile(r"(?<!\w)True(?!\w)"),
    "False": re.compile(r"(?<!\w)False(?!\w)"),
}

_WORDS, _TALK, _RESERVED, _STARTS, _ENDS = (
    part.split() for part in Path(__file__).with_name("policy_words.txt").read_text().split("\n\n")
)
_PROSE = _WORDS + _TALK
_CODE_WORDS = [word for word in _WORDS if len(word) > 2 and word not in _RESERVED]
_SYLLABLES = [start + end for start in [*_STARTS, ""] for end in _ENDS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One possible next step: replace `old`, which stands on file line `line`."""

    line: int
    old: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One message of a dialogue after the user's. `learn`: whether the policy is trained to say it."""

    role: str
    text: str
    learn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation whose last step is one of `branches`: ways to go on, each a continuation of `steps`."""

    system: str
    user: str
    steps: tuple[Step, ...]
    branches: tuple[tuple[Step, ...], ...]


def look_command(function: str, file: str) -> str:
    return f"grep -n -A 14 'def {function}' {file}"


def edit_command(function: str, old: str, file: str) -> str:
    return f"sed -i '/def {function}/,+14s/{old}/{SWAPS[old]}/' {file}"


def edits_on(number: int, line: str) -> list[Edit]:
    """The operators of one code line whose first occurrence is the operator itself, outside strings and comments."""
    code = re.sub(r"\"[^\"]*\"|'[^']*'", lambda m: "_" * len(m.group()), line).split("#")[0]
    found: list[Edit] = []
    for old in SWAPS:
        alone = _ALONE.get(old)
        match = alone.search(code) if alone else re.search(re.escape(old), code)
        if match and match.start() == line.find(old):
            found.append(Edit(line=number, old=old))
    return found


# --------------------------------------------------------------------------- names


def _word(rng: random.Random) -> str:
    pick = rng.random()
    if pick < 0.1:
        return rng.choice(_PROSE).replace("'", "")
    if pick < 0.2:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3))) or "x"
    return rng.choice(_CODE_WORDS)


def _name(rng: random.Random) -> str:
    words = [_word(rng) for _ in range(rng.choice((1, 1, 2, 2, 2, 3)))]
    style = rng.random()
    if style < 0.02:
        return f"__{words[0]}__"
    if style < 0.06:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    name = "_".join(words)
    if style < 0.16:
        name += rng.choice(("", "_")) + str(rng.randint(0, 300))
    if style > 0.9:
        name = "_" + name
    return name


def _variable(rng: random.Random) -> str:
    return rng.choice("abcdefhijkmnpqrstuvwxyz") if rng.random() < 0.3 else _name(rng)


def _file(rng: random.Random) -> str:
    parts = [
        rng.choice(("_", "_", "-")).join(_word(rng) for _ in range(rng.choice((1, 1, 2))))
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    if rng.random() < 0.3:
        parts.insert(0, rng.choice(("src", "lib", ".", "app")))
    stem = rng.choice(("", "", "", "_")) + "_".join(_word(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    if rng.random() < 0.1:
        stem += str(rng.randint(0, 300))
    return "/".join([*parts, stem + ".py"])


# --------------------------------------------------------------------------- code


class _Code:
    """Random Python-like lines over a few names."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = [_variable(rng) for _ in range(rng.randint(2, 5))]
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            self.names.append("self." + _name(rng))
        if rng.random() < 0.25:
            self.names.append("_".join(_word(rng) for _ in range(rng.randint(1, 3))).upper())
        if rng.random() < 0.25:
            self.names.append(f"{_variable(rng)}.{_name(rng)}")

    def name(self) -> str:
        return self.rng.choice(self.names)

    def number(self) -> str:
        return self.rng.choice(("0", "1", "0", "1", "2", str(self.rng.randint(2, 300)), "0.5", "1.0", "-1", "100"))

    def atom(self) -> str:
        pick = self.rng.random()
        if pick < 0.5:
            return self.name()
        if pick < 0.62:
            return self.number()
        if pick < 0.74:
            return f"{self.name()}[{self.rng.choice(('0', '1', '-1', 'i', self.name(), '1:', ':2'))}]"
        if pick < 0.84:
            return f"len({self.name()})"
        if pick < 0.9:
            return f'"{_word(self.rng)}"'
        return (
            f"{self.name()}.{_word(self.rng)}({self.rng.choice(('', self.name(), self.name() + ', ' + self.number()))})"
        )

    def value(self) -> str:
        pick = self.rng.random()
        if pick < 0.3:
            return self.atom()
        if pick < 0.65:
            first = self.atom()
            return f"{first} {self.rng.choice(('+', '-', '+', '-', '*', '//', '%', '/'))} {self.atom()}"
        if pick < 0.8:
            return (
                f"{self.rng.choice(('min', 'max', 'min', 'max', 'sum', 'round', 'int'))}({self.atom()}, {self.atom()})"
            )
        if pick < 0.88:
            return self.rng.choice(("True", "False", "None", "[]", "{}"))
        if pick < 0.94:
            return f"({self.atom()} + {self.number()}) * {self.atom()}"
        return f"{self.atom()} if {self.condition()} else {self.atom()}"

    def condition(self) -> str:
        first = self.comparison()
        pick = self.rng.random()
        return first if pick < 0.65 else f"{first}{self.rng.choice((' and ', ' or '))}{self.comparison()}"

    def comparison(self) -> str:
        pick = self.rng.random()
        if pick < 0.12:
            return self.rng.choice(("not ", "")) + self.name()
        if pick < 0.2:
            name, relation = self.name(), self.rng.choice(("in", "not in", "is", "is not"))
            return f"{name} {relation} {self.rng.choice(('None', self.name()))}"
        return f"{self.atom()} {self.rng.choice(('<', '<=', '>', '>=', '==', '!='))} {self.atom()}"

    def simple(self) -> str:
        forms: tuple[Callable[[], str], ...] = (
            lambda: f"{self.name()} = {self.value()}",
            lambda: f"{self.name()} = {self.value()}",
            lambda: f"{self.name()} {self.rng.choice(('+=', '-=', '*='))} {self.atom()}",
            lambda: f"return {self.value()}",
            lambda: f"return {self.condition()}",
            lambda: f"{self.name()}.append({self.value()})",
            lambda: f"{self.name()}[{self.atom()}] = {self.value()}",
            lambda: self.rng.choice(
                ("continue", "break", "return", "pass", f"yield {self.atom()}", f"del {self.name()}")
            ),
            lambda: f'raise {self.rng.choice(("ValueError", "KeyError", "TypeError"))}("{_words(self.rng, 2, 5)}")',
            lambda: (
                f"{self.name()} = {self.name()}({self.atom()}, {_word(self.rng)}={self.rng.choice(('True', 'False'))})"
            ),
            lambda: f"{self.name()}, {self.name()} = {self.atom()}, {self.atom()}",
        )
        return self.rng.choice(forms)()

    def opener(self) -> str:
        pick = self.rng.random()
        if pick < 0.6:
            return f"if {self.condition()}:"
        if pick < 0.7:
            return f"while {self.condition()}:"
        if pick < 0.8:
            end = self.rng.choice(("{}", "1, {} + 1", "0, {}")).format(self.atom())
            return f"for {self.rng.choice('ijkx')} in range({end}):"
        if pick < 0.9:
            return f"for {self.name()} in {self.name()}:"
        return self.rng.choice(("else:", "try:", f"elif {self.condition()}:", "except ValueError:"))

    def function(self, name: str, indent: int, length: int) -> list[str]:
        """`length` lines; those that only speak (docstring, comments) are marked by a leading NUL."""
        pad = " " * indent
        params = [p for p in self.names if "." not in p and p.islower()][:4] or ["x"]
        if indent:
            params.insert(0, "self")
        if self.rng.random() < 0.3:
            params[-1] += self.rng.choice(("=0", "=1", "=None", ": int = 0", "=True", ": int"))
        arrow = self.rng.choice(("", "", "", " -> int", " -> bool", " -> str"))
        lines = [f"{pad}def {name}({', '.join(params)}){arrow}:"]
        depth = indent + 4
        if self.rng.random() < 0.35:
            text = _words(self.rng, 3, 9).capitalize()
            if self.rng.random() < 0.7:
                lines.append(f'\0{" " * depth}"""{text}."""')
            else:
                lines += [
                    f'\0{" " * depth}"""{text}.',
                    "\0",
                    f"\0{' ' * depth}{_words(self.rng, 3, 8)}.",
                    f'\0{" " * depth}"""',
                ]
        while len(lines) < length:
            pick = self.rng.random()
            if pick < 0.06:
                lines.append(f"\0{' ' * depth}# {_words(self.rng, 2, 7)}")
            elif pick < 0.1:
                lines.append("")
            elif pick < 0.38 and depth < indent + 16:
                lines.append(" " * depth + self.opener())
                depth += 4
            else:
                lines.append(" " * depth + self.simple())
                if depth > indent + 4 and self.rng.random() < 0.5:
                    depth = max(indent + 4, depth - 4 * self.rng.randint(1, 2))
        return lines[:length]


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(_PROSE) if rng.random() < 0.85 else _word(rng) for _ in range(rng.randint(low, high)))


def _group(rng: random.Random, function: str, longest: int, first: int) -> tuple[str, list[Edit]]:
    """The lines that `grep -n -A` prints of one match, and every edit its code lines allow."""
    indent = rng.choice((0, 0, 4))
    code = _Code(rng)
    own = rng.randint(min(3, longest), longest)
    lines = code.function(function, indent, own)
    shown = own if own < 5 and rng.random() < 0.5 else rng.randint(own, longest)
    while len(lines) < shown:
        lines += [""] * (1 if indent else 2)
        lines += code.function(function + "_all" if rng.random() < 0.05 else _name(rng), indent, rng.randint(2, 6))
    lines = lines[:shown]
    edits = [e for n, line in enumerate(lines, first) if not line.startswith("\0") for e in edits_on(n, line)]
    mark = [":" if re.match(rf" *def {re.escape(function)}", line) else "-" for line in lines]
    text = "".join(f"{n}{m}{line.lstrip(chr(0))}\n" for n, (m, line) in enumerate(zip(mark, lines, strict=True), first))
    return text, edits


def _listing(rng: random.Random, function: str, longest: int) -> tuple[str, list[Edit]]:
    """What `grep -n -A 14` prints, mostly of one match, and every edit it allows."""
    first = int(10 ** rng.uniform(0, 3.3))
    texts: list[str] = []
    edits: list[Edit] = []
    for _ in range(rng.choice((2, 3)) if rng.random() < 0.06 else 1):
        text, more = _group(rng, function, longest, first)
        texts.append(text)
        edits += more
        first += text.count("\n") + rng.randint(1, 100)
    return "--\n".join(texts), edits


# --------------------------------------------------------------------------- talk


_ASIDES: tuple[Callable[[_Code, str], str], ...] = (
    lambda code, function: f"`{code.name()}`",
    lambda code, function: f"`{function}`",
    lambda code, function: f"`{function}({code.atom()}, {code.atom()})`",
    lambda code, function: f"`{code.condition()}`",
    lambda code, function: f"`{code.simple()}`",
    lambda code, function: code.condition(),
    lambda code, function: code.number(),
    lambda code, function: f"{code.rng.randint(0, 300)}.{code.rng.randint(0, 99):02}",
    lambda code, function: f'"{_words(code.rng, 1, 3)}"',
    lambda code, function: f"({_words(code.rng, 1, 4)})",
    lambda code, function: f"{_words(code.rng, 1, 1)},",
    lambda code, function: f"{_words(code.rng, 1, 1)};",
    lambda code, function: f"{_words(code.rng, 1, 1)}-{_words(code.rng, 1, 1)}",
    lambda code, function: f"{_words(code.rng, 1, 1).capitalize()}'s",
    lambda code, function: _words(code.rng, 1, 1).upper(),
)


def _issue(rng: random.Random, function: str, file: str, longest: int) -> str:
    code = _Code(rng)
    budget = rng.randint(3, longest)
    sentences: list[str] = []
    while budget > 0:
        size = min(rng.randint(3, 14), max(budget, 3))
        words = _words(rng, size, size).split(" ")
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            words.insert(rng.randint(0, len(words)), rng.choice(_ASIDES)(code, function))
        sentence = " ".join(words) + rng.choice((".", ".", ".", "?", ":", ","))
        sentences.append(sentence[:1].upper() + sentence[1:] if rng.random() < 0.9 else sentence)
        budget -= size
    gap = rng.choice((" ", " ", "\n", "\n\n"))
    return gap.join(sentences) + rng.choice(("\n", "\n\n")) + f"Start with `{function}` in `{file}`."


def _call(command: str, *, learn: bool = True) -> Step:
    return Step(role="assistant", text=call_text(command), learn=learn)


def _say(text: str) -> Step:
    return Step(role="assistant", text=text, learn=True)


def _closing(rng: random.Random, function: str, file: str) -> Step:
    return _say(rng.choice((f"I changed `{function}`.", f"Done: `{file}` is changed.", "I changed one operator.")))


def call_text(command: str) -> str:
    """An assistant turn that runs `command` with the bash tool, as the chat template writes it."""
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def _failed(rng: random.Random, output: str, code: int) -> Step:
    return Step(role="tool", text=f"{output}{rng.choice(('', chr(10)))}\n\nCommand exited with code {code}")


def _tries(
    rng: random.Random, edits: list[Edit], function: str, file: str, ways: int, *, again: bool
) -> tuple[tuple[Step, ...], ...]:
    """Up to `ways` different edits, each followed by what comes after it."""
    branches: list[tuple[Step, ...]] = []
    shown = sorted({edit.old for edit in edits})
    for old in rng.sample(shown, min(ways, len(shown))):
        turn = _call(edit_command(function, old, file))
        pick = rng.random()
        if pick < 0.35:
            branches.append((turn, Step(role="tool", text="(no output)"), _closing(rng, function, file)))
        elif pick < 0.4 and again:
            error = _failed(rng, f"sed: can't read {file}: No such file or directory", 2)
            branches.append((turn, error, _say(f"I could not change `{file}`.")))
        else:
            branches.append((turn,))
    return tuple(branches)


def dialogue(rng: random.Random, *, words: int = 80, lines: int = 15, ways: int = 6) -> Dialogue:
    """One dialogue. `words`: most in the issue's text; `lines`: most shown of the file; `ways`: most branches."""
    function, file = _name(rng), _file(rng)
    prompt = SYSTEM_PROMPT if rng.random() < 0.8 else _words(rng, 2, 12).capitalize() + "."
    folder = rng.choice(("testbed", "repo", f"work/{_word(rng)}", f"workspace/{_name(rng).replace('_', '-')}"))
    system = f"{prompt}\n\n<cwd>\n/{folder}\n</cwd>"
    user = _issue(rng, function, file, words)
    look = look_command(function, file)
    steps: list[Step] = [_call(look)]
    pick = rng.random()
    if pick < 0.03:
        steps.append(_failed(rng, f"grep: {file}: No such file or directory", 2))
        if rng.random() < 0.5:
            return Dialogue(system=system, user=user, steps=tuple(steps), branches=((_call(look),),))
        steps += [_call(look), _failed(rng, f"grep: {file}: No such file or directory", 2)]
        return Dialogue(system=system, user=user, steps=tuple(steps), branches=((_say(f"There is no `{file}`."),),))
    if pick < 0.06:
        steps.append(_failed(rng, "(no output)", 1))
        return Dialogue(
            system=system, user=user, steps=tuple(steps), branches=((_say(f"There is no `{function}` in `{file}`."),),)
        )
    listing, edits = _listing(rng, function, lines)
    steps.append(Step(role="tool", text=listing))
    if not edits:
        branches: tuple[tuple[Step, ...], ...] = ((_say(f"I see no operator to change in `{function}`."),),)
    elif pick < 0.12:
        broken = edit_command(function, rng.choice(edits).old, file).replace("/'", rng.choice(("'", "/'/", "//'")), 1)
        reason = rng.choice(("unterminated `s' command", "unknown option to `s'"))
        error = f"sed: -e expression #1, char {rng.randint(8, 20)}: {reason}"
        steps += [_call(broken, learn=False), _failed(rng, error, 1)]
        branches = _tries(rng, edits, function, file, ways, again=False)
    else:
        branches = _tries(rng, edits, function, file, ways, again=True)
    return Dialogue(system=system, user=user, steps=tuple(steps), branches=branches)
