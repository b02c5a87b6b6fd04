"""Class names: which labels mean the same class, which ones people would confuse, and which are no names at all."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable

MAX_NAME = 64
# So many of a kind are named; ten show the pattern, ten thousand hide it.
NAMED = 10

RESERVED = "ood"  # every head's last output
# Control characters, lone surrogates (a file name that is not UTF-8), line and paragraph separators.
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
# They reorder the text around them, so that a name reads as another one.
_REFUSED_CHARACTERS = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def canonical(label: str) -> str:
    """The class that a label means: macOS hands out decomposed file names, and a space at the end is never seen."""
    return unicodedata.normalize("NFC", label).strip()


def confusable_key(label: str) -> str:
    """Equal for names that people take for one another: case, spaces, invisible characters, Unicode form."""
    seen = "".join(c for c in unicodedata.normalize("NFKC", label) if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", " ".join(seen.split()).casefold())


def name_problems(label: str, max_name: int = MAX_NAME) -> list[str]:
    """What keeps a label from being a class name, a line a problem."""
    name = canonical(label)
    if not confusable_key(label):
        return [f"class name {shown(label)} is blank: give the class a name"]
    problems = []
    if name.startswith(".") or "/" in name or "\\" in name or re.match(r"[A-Za-z]:", name):
        problems.append("is a path or starts with a dot: use a plain name with no slash, drive or leading dot")
    if any(unicodedata.category(c) in _REFUSED_CATEGORIES or c in _REFUSED_CHARACTERS for c in label):
        problems.append("holds control characters or is not valid text: remove them")
    if confusable_key(label) == RESERVED:
        problems.append("is reserved for what is not known: choose another name")
    if len(name) > max_name:
        problems.append(f"has {len(name)} characters, more than {max_name}: shorten it")
    return [f"class name {shown(label)} {problem}" for problem in problems]


def confusion_problems(labels: Iterable[str], known_classes: Collection[str]) -> list[str]:
    """Labels that people take for a known class or for one another, a line a problem; `known_classes` are canonical."""
    problems = []
    known = {confusable_key(name): name for name in known_classes}
    alike: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        key = confusable_key(label)
        alike[key].append(label)
        if key in known and canonical(label) not in known_classes:
            problems.append(
                f"class {shown(label)} differs from the known class {shown(known[key])} only in case, spaces or "
                "Unicode form: write it the same way, or choose a clearly different name"
            )
    for same in alike.values():
        if len(same) > 1:
            # Two Unicode forms of one name look the same on a screen: spell the code points out.
            same_look = len({canonical(label) for label in same}) == 1
            names = " and ".join(ascii(label) if same_look else shown(label) for label in same[:NAMED])
            problems.append(
                f"classes {names} differ only in case, spaces or Unicode form: put their images in one class, "
                "or choose clearly different names"
            )
    return problems


def shown(text: str, longest: int = 120) -> str:
    """A name for a message: quoted, on one line whatever it holds, and cut when somebody sent a novel."""
    return repr(text if len(text) <= longest else text[: longest - 1] + "…")
