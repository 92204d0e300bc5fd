"""The files that `trimaran launch` would write for a recipe on each target, without writing them."""

import shlex
from collections.abc import Sequence
from functools import cache

from trimaran.app.recipe.request import Request
from trimaran.app.train.launch_request import launch_request, preview_options, resolve_launch
from trimaran.launch.targets.target import TARGET_CLASSES, open_target
from trimaran.ui.viz.subject import Launches, LaunchText


def launches_of(file: str | None, settings: Sequence[str]) -> Launches:
    """Return the launch of a recipe on each target; a call plans it, and the plan is kept for the other targets."""

    @cache
    def planned() -> Request:
        return resolve_launch(file, settings)

    @cache
    def launch(target: str) -> LaunchText:
        found = open_target(target)
        options = preview_options(found)
        files = found.render(launch_request(found, planned(), options))
        words = [*([file] if file else []), *(word for each in settings for word in ("--set", each))]
        words += [word for each in options.site for word in ("--site", each)]
        return LaunchText(
            command=shlex.join(["trimaran", "launch", *words, "--on", target]),
            files=dict(files.files),
            main=files.main,
            submit=tuple(shlex.join(each) for each in files.submit),
        )

    return {target: (lambda target=target: launch(target)) for target in TARGET_CLASSES}
