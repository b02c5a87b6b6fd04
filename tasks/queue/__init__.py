"""The task queue: submit and read tasks (`TaskQueue`), work on them (`Lease`), announce new versions."""

from tasks.queue.announcements import announce, listen
from tasks.queue.connection import call_redis, connect, key_prefix, uses_sentinel
from tasks.queue.lease import Lease
from tasks.queue.queue import Submitted, TaskQueue
from tasks.queue.server_check import check_redis
from tasks.queue.task import ENDED, STATES, Task, TaskProgress, TaskState, TaskSummary
