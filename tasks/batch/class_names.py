"""Class names: which labels mean the same class, which are easily confused, and which are invalid."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable

MAX_LENGTH = 64
MAX_LISTED = 10  # problems of one kind that a message lists before it only counts them

RESERVED = "ood"  # the last output of every head
# Control characters, lone surrogates (a file name that is not UTF-8), line and paragraph separators.
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
# Bidirectional controls reorder the text around them, so that a name reads as another one.
_REFUSED_CHARACTERS = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def canonical(label: str) -> str:
    """The class name of a label: NFC (macOS decomposes file names), without surrounding spaces."""
    return unicodedata.normalize("NFC", label).strip()


def confusable_key(label: str) -> str:
    """Equal for names that differ only in case, spaces, invisible characters or Unicode form."""
    visible = "".join(c for c in unicodedata.normalize("NFKC", label) if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", " ".join(visible.split()).casefold())


def name_problems(label: str) -> list[str]:
    """Why a label is not a valid class name, one line per problem."""
    name = canonical(label)
    if not confusable_key(label):
        return [f"class name {quoted(label)} is blank: give the class a name"]
    problems = []
    if name.startswith(".") or "/" in name or "\\" in name or re.match(r"[A-Za-z]:", name):
        problems.append("is a path or starts with a dot: use a plain name with no slash, drive or leading dot")
    if any(unicodedata.category(c) in _REFUSED_CATEGORIES or c in _REFUSED_CHARACTERS for c in label):
        problems.append("holds control characters or is not valid text: remove them")
    if confusable_key(label) == RESERVED:
        problems.append("is reserved for unknown images: choose another name")
    if len(name) > MAX_LENGTH:
        problems.append(f"has {len(name)} characters, more than {MAX_LENGTH}: shorten it")
    return [f"class name {quoted(label)} {problem}" for problem in problems]


def confusion_problems(labels: Iterable[str], known_classes: Collection[str]) -> list[str]:
    """Labels that are easily confused with a known class or with each other; `known_classes` are canonical."""
    problems = []
    known = {confusable_key(name): name for name in known_classes}
    by_key: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        key = confusable_key(label)
        by_key[key].append(label)
        if key in known and canonical(label) not in known_classes:
            problems.append(
                f"class {quoted(label)} differs from the known class {quoted(known[key])} only in case, spaces or "
                "Unicode form: write it the same way, or choose a clearly different name"
            )
    for confusable in by_key.values():
        if len(confusable) > 1:
            # Two Unicode forms of one name look the same on a screen: write the code points.
            look_same = len({canonical(label) for label in confusable}) == 1
            names = " and ".join(ascii(label) if look_same else quoted(label) for label in confusable[:MAX_LISTED])
            problems.append(
                f"classes {names} differ only in case, spaces or Unicode form: put their images in one class, "
                "or choose clearly different names"
            )
    return problems


def quoted(text: str, max_length: int = 120) -> str:
    """A name for a message: quoted, escaped to one line, and cut to `max_length`."""
    return repr(text if len(text) <= max_length else text[: max_length - 1] + "…")
