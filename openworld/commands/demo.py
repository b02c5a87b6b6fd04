"""`openworld demo`: the whole loop on a running service, with real pictures and honest figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.errors import OpenWorldError
from models.files import sha256_bytes
from openworld import remote, tables
from openworld.commands.demo_images import views
from openworld.commands.teach import follow, zipped

if TYPE_CHECKING:
    from service.client import Client, TaskAnswer

SUMMARY = "show the whole loop on a running service: teach, find novel, label, learn, not forget"
EPILOG = """\
Start the service first (`make run`, or `openworld up`). Six classes are used, each ONE photograph of scikit-image as a
moving camera would see it: enough to show the loop, not to measure accuracy. What it teaches stays in the service; a
new data folder gives it back as it was. Run twice, it finds that nothing is novel any more, and says so.
"""
TAUGHT, ASKED = 20, 15  # views of a class
TASKS = (("cat", "coffee"), ("rocket", "motorcycle"))
NEW = ("astronaut", "coins")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    remote.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with remote.connect(arguments.url, timeout=60.0) as client:
        story = Story(client)
        for names in TASKS:
            story.teach(names)
        flagged = story.find_novel(NEW)
        story.label(NEW, flagged)
        story.tidy()
    story.show()
    return 0


@dataclass
class Count:
    """How the views of one class were answered at one time."""

    right: int = 0
    novel: int = 0
    wrong: list[str] = field(default_factory=list)

    def told(self, taught: bool) -> str:
        """For a class that was never taught, `novel` is the right answer."""
        asked = self.right + self.novel + len(self.wrong)
        parts = [f"{tables.percent(self.right / asked)} right"] if taught or self.right else []
        parts += [f"{tables.percent(self.novel / asked)} novel"] if self.novel else []
        parts += [f"{len(self.wrong)} taken for {', '.join(sorted(set(self.wrong)))}"] if self.wrong else []
        return ", ".join(parts)


class Story:
    """What happens, told as it happens; `show` tells it once more as a table."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._columns: list[str] = []
        self._cells: dict[str, list[str]] = {}
        self._taught: set[str] = set()
        self._asked: list[str] = []
        self._say(f"a service with version {client.versions().serving}")

    def teach(self, names: Sequence[str]) -> None:
        """A batch that somebody has labelled."""
        self._say(f"\nTeaching {' and '.join(names)}, {TAUGHT} labelled views each.")
        images = [(name, data) for name in names for data in views(name, TAUGHT)]
        self._learn(self._client.teach_zip(zipped(images)), names)

    def find_novel(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Show what was never taught; (class, as only we know) -> what the inbox kept of it."""
        self._say(f"\nThe camera now sees {' and '.join(names)}, which nobody has taught.")
        sent = {sha256_bytes(data): name for name in names for data in views(name, TAUGHT)}
        answers = [answer for name in names for answer in self._ask(views(name, TAUGHT))]
        novel = answers.count(None)
        self._say(f"  {novel} of {len(answers)} views were flagged as novel.")
        if not novel:
            self._say("  This service has met them before: it has run this demo already.")
        found: dict[str, list[str]] = {name: [] for name in names}
        for novelty in self._client.novelties():
            if novelty.id in sent:
                found[sent[novelty.id]].append(novelty.id)
        kept = sum(len(ids) for ids in found.values())
        self._say(f"  The inbox kept {kept} of them; views that are nearly the same are folded into one.")
        return found

    def label(self, names: Sequence[str], found: dict[str, list[str]]) -> None:
        """What a person does in the inbox: name them, and teach."""
        labels = {name: ids for name, ids in found.items() if len(ids) >= 2}
        if not labels:
            self._say("  There is nothing new to label.")
            self._columns.append("as it is now")
            self._measure(names)
            return
        self._say(f"\nA person names them in the inbox: {', '.join(f'{len(i)} {n}' for n, i in labels.items())}.")
        self._learn(self._client.teach(labels), names)

    def tidy(self) -> None:
        """The questions were ours and no finds of a robot: nobody should have to name them."""
        self._client.dismiss(self._asked)

    def show(self) -> None:
        rows = [[name, *cells] for name, cells in self._cells.items()]
        out = tables.console()
        out.print()
        title = f"{ASKED} views of each class that were never taught, asked after every task"
        out.print(tables.table(["class", *self._columns], rows, title=title))
        out.print("Each class is one photograph seen by a moving camera: this shows the loop, not an accuracy.")

    def _learn(self, task: TaskAnswer, names: Sequence[str]) -> None:
        ended = follow(self._client, task, " and ".join(names))
        if ended.state != "published":
            raise OpenWorldError(f"task {task.id} ended as {ended.state}: {ended.reason}")
        self._say(f"  Version {ended.version} has learned it{'' if task.fresh else ' (some time ago)'}.")
        self._columns.append(f"version {ended.version}")
        self._measure(names, ended.version)

    def _measure(self, names: Sequence[str], version: int | None = None) -> None:
        """All classes so far, and those that are to come."""
        for name in [*(n for task in TASKS for n in task), *NEW]:
            count, pictures = Count(), views(name, ASKED, first=1000)
            for answer in self._ask(pictures, version):
                if answer is None:
                    count.novel += 1
                elif answer == name:
                    count.right += 1
                else:
                    count.wrong.append(answer)
            self._taught.update(names)
            told = count.told(taught=name in self._taught)
            self._cells.setdefault(name, []).append(told)
            if name in names:
                self._say(f"  {name}: {told}")

            self._asked += [sha256_bytes(picture) for picture in pictures]

    def _ask(self, pictures: Sequence[bytes], version: int | None = None) -> list[str | None]:
        predictor = remote.RemotePredictor(self._client, version)
        answers = predictor.predict(pictures)
        return [None if isinstance(one, Exception) or one.novel else one.label for one in answers]

    def _say(self, text: str) -> None:
        tables.console().print(text, markup=False)
