"""The feeds of the runs that pages show: shared by all pages, so that a second visit reads only what is new."""

import threading
from collections import OrderedDict

from trimaran.runs.run_directory import MARKER
from trimaran.ui.report.run_feed import RunFeed
from trimaran.ui.web.runs_root import RunsRoot

MAX_FEEDS = 8  # a run of a million steps takes tens of megabytes


class RunFeeds:
    """Keeps the feeds that were used last."""

    def __init__(self, runs: RunsRoot) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._feeds: OrderedDict[str, tuple[tuple[int, int], RunFeed]] = OrderedDict()

    def get(self, slug: str) -> RunFeed:
        """Return the feed of a run; raise UserError if there is no such run, or if its files are damaged."""
        run = self._runs.open(slug)
        status = (run.path / MARKER).lstat()
        version = (status.st_ino, status.st_mtime_ns)  # another run may have taken the name
        with self._lock:
            kept = self._feeds.get(slug)
            if kept is not None and kept[0] == version:
                self._feeds.move_to_end(slug)
                return kept[1]
        feed = RunFeed(run)
        with self._lock:
            self._feeds[slug] = version, feed
            while len(self._feeds) > MAX_FEEDS:
                self._feeds.popitem(last=False)
        return feed
