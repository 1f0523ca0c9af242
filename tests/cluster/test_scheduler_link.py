"""A group that loads or reports while the global scheduler is away joins it when it is back."""

import asyncio

import pytest
import ray

from pagedray.cluster import scheduler_link
from pagedray.cluster.scheduler_link import SchedulerLink


class Scheduler:
    """As an actor handle. Calls fail with `error` while it is `away`; a restarted one knows no group."""

    def __init__(self, error):
        self.error, self.away, self.known = error, True, []
        self.reports = 0

    def __getattr__(self, method):
        class Method:
            remote = staticmethod(lambda *args: self._call(method, *args))

        return Method

    async def _call(self, method, *args):
        await asyncio.sleep(0)
        if self.away:
            raise self.error
        if method == "register_group":
            self.known.append(args[0])
        elif method == "report":
            self.reports += 1
            return bool(self.known)


def test_a_group_that_ends_while_it_is_told_to_report_reports_no_more():
    """Python 3.11's `wait_for` swallows a cancellation that comes with what it waits for."""

    async def test():
        scheduler = Scheduler(None)
        scheduler.away = False
        link = SchedulerLink(scheduler, lambda link: "the group")
        reporter = asyncio.create_task(link.report_for_ever("g", lambda: None, lambda: None))
        await asyncio.sleep(0.01)
        link.wake()
        await asyncio.sleep(0)
        reporter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reporter, 5)

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("error", [ray.exceptions.ActorDiedError(), TimeoutError()])
def test_a_scheduler_that_is_away_while_a_group_loads_is_joined_later(error, monkeypatch):
    monkeypatch.setattr(scheduler_link, "_REPORT_SECONDS", 0.001)

    async def test():
        scheduler = Scheduler(error)
        link = SchedulerLink(scheduler, lambda link: "the group")
        await link.keep_alive()
        await link.join()
        assert scheduler.known == []
        reporter = asyncio.create_task(link.report_for_ever("g", lambda: None, lambda: None))
        await asyncio.sleep(0.01)
        scheduler.away = False
        while scheduler.reports < 3:
            await asyncio.sleep(0.001)
        assert scheduler.known == ["the group"]
        reporter.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))
