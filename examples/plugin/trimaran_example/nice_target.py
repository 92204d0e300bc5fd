"""A launch target: this machine at low priority, for a workstation that somebody also works on."""

from dataclasses import replace

from trimaran.launch.targets.local_target import SCRIPT, LocalTarget
from trimaran.launch.targets.target import LaunchFiles, LaunchRequest


class NiceTarget(LocalTarget):
    contract = 1
    name = "nice"

    def render(self, request: LaunchRequest) -> LaunchFiles:
        files = super().render(request)
        first, _, rest = files.files[SCRIPT].partition("\n")
        return replace(files, files={SCRIPT: f"{first}\nrenice -n 10 -p $$ > /dev/null\n{rest}"})
