"""The task queue: submit and read tasks (`TaskQueue`), work on them (`Lease`), announce new versions."""

from tasks.queue.announcements import announce, listen
from tasks.queue.connection import connect, key_prefix
from tasks.queue.lease import Lease
from tasks.queue.queue import Submitted, TaskQueue
from tasks.queue.task import ENDED, STATES, Task, TaskProgress, TaskState, TaskSummary
