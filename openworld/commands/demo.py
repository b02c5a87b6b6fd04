"""`openworld demo`: the whole loop on a running service: teach, detect novel images, label them, measure forgetting."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from models.errors import OpenWorldError
from models.files import sha256_bytes
from models.inference.answer import Answer
from openworld import remote, tables
from openworld.commands.demo_images import views
from openworld.commands.teach import follow, zipped
from service.wire.predictions import in_words

if TYPE_CHECKING:
    from service.client import Client, TaskAnswer

SUMMARY = "run the whole loop on a running service: teach, detect novel images, label them, measure forgetting"
EPILOG = """\
Start the service first (`make run`, or `openworld up`). There are six classes, each ONE photograph from scikit-image in
many views: enough to show the loop, not to measure accuracy. The classes stay in the service; use a new data folder to
be rid of them. A second run finds nothing novel.
"""
TRAINING_VIEWS, TEST_VIEWS = 20, 15  # per class
FIRST_TEST_VIEW = 1000  # test views are never training views
TASKS = (("cat", "coffee"), ("rocket", "motorcycle"))
NOVEL_CLASSES = ("astronaut", "coins")
CLASSES = [*(name for task in TASKS for name in task), *NOVEL_CLASSES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    remote.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with remote.connect(arguments.url, timeout=60.0) as client:
        demo = Demo(client)
        for names in TASKS:
            demo.teach(names)
        found = demo.send_novel_images(NOVEL_CLASSES)
        demo.label(NOVEL_CLASSES, found)
        demo.dismiss_test_images()
    demo.show()
    return 0


def summarise(name: str, answers: Sequence[Answer], taught: bool) -> str:
    """The answers to one class's test views in words; "never seen" is correct if the class is not taught."""
    correct = [one for one in answers if one.label == name]
    sure = sum(one.certainty == "sure" for one in correct)
    never_seen = sum(one.novel for one in answers)
    wrong = [one.label for one in answers if one.label not in (name, None)]
    parts = [f"{len(correct)} correct ({sure} sure)"] if taught or correct else []
    parts += [f"{never_seen} never seen"] if never_seen else []
    parts += [f"{len(wrong)} wrong ({', '.join(sorted(set(map(str, wrong))))})"] if wrong else []
    return ", ".join(parts)


def _words(answer: Answer) -> str:
    return in_words(answer.certainty, answer.label, answer.nearest, answer.p_novel)


class Demo:
    """The steps of the demo, each printed as it happens, and the table at the end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._columns: list[str] = []
        self._cells: dict[str, list[str]] = {name: [] for name in CLASSES}
        self._taught: set[str] = set()
        self._test_images: list[str] = []
        self._print(f"service with active version {client.versions().serving}")

    def teach(self, names: Sequence[str]) -> None:
        """Submit a labelled batch."""
        self._print(f"\nTeach {' and '.join(names)}: {TRAINING_VIEWS} labelled views per class.")
        images = [(name, data) for name in names for data in views(name, TRAINING_VIEWS)]
        with zipped(images) as file:
            task = self._client.teach_zip(file)
        self._follow(task, names)

    def send_novel_images(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Ask for views of classes that are not taught; the ids that the inbox kept, by class."""
        self._print(f"\nSend views of {' and '.join(names)}, which are not taught.")
        sent = {sha256_bytes(data): name for name in names for data in views(name, TRAINING_VIEWS)}
        answers = [answer for name in names for answer in self._ask(views(name, TRAINING_VIEWS))]
        novel = [answer for answer in answers if answer.novel]
        self._print(f"  {len(novel)} of {len(answers)} views were never seen.")
        if novel:
            self._print(f"  For example: {_words(novel[0])}")
        else:
            self._print("  The service knows these classes: the demo has run on it before.")
        found: dict[str, list[str]] = {name: [] for name in names}
        for novelty in self._client.novelties():
            if novelty.id in sent:
                found[sent[novelty.id]].append(novelty.id)
        kept = sum(len(ids) for ids in found.values())
        self._print(f"  The inbox kept {kept} of them; views that are nearly the same are folded into one.")
        return found

    def label(self, names: Sequence[str], found: dict[str, list[str]]) -> None:
        """Label novelties of the inbox and teach them, as a person does in the console."""
        labels = {name: ids for name, ids in found.items() if len(ids) >= 2}
        if not labels:
            self._print("  There is nothing new to label.")
            self._columns.append("now")
            self._measure(names)
            return
        self._print(f"\nLabel them in the inbox: {', '.join(f'{len(ids)} {name}' for name, ids in labels.items())}.")
        self._follow(self._client.teach(labels), names)

    def dismiss_test_images(self) -> None:
        """Remove the test views from the inbox."""
        self._client.dismiss(self._test_images)

    def show(self) -> None:
        out = tables.console()
        out.print()
        title = f"{TEST_VIEWS} test views per class, after every task"
        out.print(tables.table(["class", *self._columns], [[name, *row] for name, row in self._cells.items()], title))
        out.print("Each class is one photograph in many views: this shows the loop, it does not measure accuracy.")

    def _follow(self, task: TaskAnswer, names: Sequence[str]) -> None:
        started = time.monotonic()

        def on_provisional(version: int) -> None:
            seconds = time.monotonic() - started
            self._print(f"  Version {version} answers with them {seconds:.1f} s after the submission:")
            for name in names:
                answers = self._ask(views(name, TEST_VIEWS, FIRST_TEST_VIEW), version)
                self._print(f"  {name}, {TEST_VIEWS} test views: {summarise(name, answers, taught=True)}")

        ended = follow(self._client, task, " and ".join(names), on_provisional)
        if ended.state != "published":
            raise OpenWorldError(f"task {task.id} is {ended.state}: {ended.reason}")
        self._print(f"  Version {ended.version} has learned them{'' if task.fresh else ' (by an earlier run)'}.")
        self._columns.append(f"version {ended.version}")
        self._measure(names, ended.version)

    def _measure(self, names: Sequence[str], version: int | None = None) -> None:
        """Ask for the test views of all classes, and print the result for `names`."""
        self._taught.update(names)
        for name in CLASSES:
            images = views(name, TEST_VIEWS, FIRST_TEST_VIEW)
            answers = self._ask(images, version)
            text = summarise(name, answers, name in self._taught)
            self._cells[name].append(text)
            if name in names:
                self._print(f"  {name}, {TEST_VIEWS} test views: {text}. For example: {_words(answers[0])}")
            self._test_images += [sha256_bytes(image) for image in images]

    def _ask(self, images: Sequence[bytes], version: int | None = None) -> list[Answer]:
        answers = remote.RemotePredictor(self._client, version).predict(images)
        return [one for one in answers if isinstance(one, Answer)]

    def _print(self, text: str) -> None:
        tables.console().print(text, markup=False)
