"""Prefixes of small functions that the demo models can sometimes complete, each with asserts on the result.

They were written for this benchmark and occur in no training text. A model of 14 million parameters continues a pattern
more readily than it computes, so most prompts contain the required pattern. Plain sampling completes each of them
correctly in some samples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Function:
    """A prompt that ends inside a function, and asserts on the complete function."""

    prompt: str
    asserts: str


NODE = "class Node:\n    def __init__(self, name, parent=None):\n        self.name = name\n        self."
BOX = (
    "class Box:\n    def __init__(self, {0}):\n        self._{0} = {0}\n\n"
    "    @property\n    def {0}(self):\n        return"
)
SIZES = (
    "class Box:\n    def __init__(self, width, height):\n        self.width = width\n        self.height = height\n\n"
    "    def get_width(self):\n        return self.width\n\n    def get_height(self):\n        return"
)
COUNTER = "class Counter:\n    def __init__(self):\n        self.count = 0\n\n    def "
COUNT = (
    "def count(items, wanted):\n    n = 0\n    for item in items:\n        if item == wanted:\n"
    "            n += 1\n    return"
)
INVERT = (
    "def invert(mapping):\n    result = {}\n    for key, value in mapping.items():\n"
    "        result[value] = key\n    return"
)
FLATTEN = "def flatten(lists):\n    result = []\n    for items in lists:\n        result.extend(items)\n    return"
CLAMP = "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return"
POWER = "def power(base, exponent):\n    result = 1\n    for _ in range(exponent):\n        result *= base\n    return"

FUNCTIONS = (
    Function(NODE + "parent =", "assert Node('a', 5).parent == 5"),
    Function(NODE, "assert Node('a', 5).parent == 5 and Node('a').name == 'a'"),
    Function(SIZES, "assert Box(1, 2).get_height() == 2"),
    Function(BOX.format("value"), "assert Box(3).value == 3"),
    Function(BOX.format("name"), "assert Box(3).name == 3"),
    Function(COUNTER + "increment(self):\n        self.count +=", "c = Counter()\nc.increment()\nassert c.count == 1"),
    Function(COUNTER + "decrement(self):\n        self.count -=", "c = Counter()\nc.decrement()\nassert c.count == -1"),
    Function(
        COUNTER + "reset(self):\n        self.count =",
        "c = Counter()\nc.count = 5\nc.reset()\nassert c.count == 0",
    ),
    Function("def is_empty(items):\n    return len(items) ==", "assert is_empty([]) and not is_empty([1])"),
    Function(COUNT, "assert count([1, 2, 1], 1) == 2"),
    Function(
        "def strip_lines(lines):\n    return [line.strip() for line in",
        "assert strip_lines([' a ', 'b']) == ['a', 'b']",
    ),
    Function("def names(items):\n    return [item[0] for item in", "assert names([(1, 2)]) == [1]"),
    Function("def ends(items):\n    return [item[-1] for item in", "assert ends([(1, 2)]) == [2]"),
    Function(INVERT, "assert invert({1: 2}) == {2: 1}"),
    Function(FLATTEN, "assert flatten([[1], [2, 3]]) == [1, 2, 3]"),
    Function(
        "def absolute(x):\n    if x < 0:\n        return -x\n    return",
        "assert absolute(-2) == 2 and absolute(3) == 3",
    ),
    Function(CLAMP, "assert clamp(9, 1, 5) == 5 and clamp(0, 1, 5) == 1"),
    Function("def square(x):\n    return x *", "assert square(3) == 9"),
    Function("def add(a, b):\n    return a +", "assert add(2, 3) == 5"),
    Function("def subtract(a, b):\n    return a -", "assert subtract(5, 3) == 2"),
    Function("def multiply(a, b):\n    return a *", "assert multiply(2, 3) == 6"),
    Function("def even(n):\n    return n % 2 ==", "assert even(4) and not even(3)"),
    Function("def odd(n):\n    return n % 2 ==", "assert odd(3) and not odd(4)"),
    Function(POWER, "assert power(2, 3) == 8"),
)
