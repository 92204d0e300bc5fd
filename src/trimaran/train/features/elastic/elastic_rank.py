"""A rank of an elastic run: its replica is a world of its own, which others join and leave."""

from dataclasses import replace
from pathlib import Path

from trimaran.data.feed import share_of
from trimaran.data.row_ledger import RowLedger
from trimaran.runs import Journal, RunDirectory
from trimaran.train.agreement import LoopExit, StopRequest
from trimaran.train.build import WorkerParts
from trimaran.train.change_file import ChangeFile
from trimaran.train.features.elastic.elastic_feature import ElasticFeature
from trimaran.train.features.elastic.elastic_loop import ElasticLoop, build_elastic_loop
from trimaran.train.features.elastic.replica import Replica, check_replica, join_replica
from trimaran.train.features.table import LOCAL_STEPS, features_of
from trimaran.train.plain_rank import PlainRank, Training
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.rank_context import RankContext


class ElasticTraining(Training):
    """The training of a rank of a replica, from one synchronisation to the next."""

    def __init__(self, parts: WorkerParts, loop: ElasticLoop, change_file: ChangeFile) -> None:
        super().__init__(parts, loop.start(), change_file)
        self._loop = loop

    def run(self) -> LoopExit:
        return self._loop.run(self.owner.checkpointer, self.start)

    def saves_end(self) -> bool:
        return self._loop.saves_end()

    def report_saved(self) -> None:
        self._loop.membership.report_finished()


class ElasticRank(PlainRank):
    """A rank of an elastic replica. `info` counts in the run, and the context in the replica."""

    def __init__(self, run: RunDirectory, info: RankInfo, link: SupervisorLink, replica: Replica) -> None:
        super().__init__(run, info, replace(link, rank_memories=()))  # other replicas are the copies
        self._replica, self._plan = replica, run.read_plan()
        in_replica = share_of(replica.plan(self._plan), 0)
        self._ledger = RowLedger(in_replica, global_batch=self._plan.global_batch)
        self._feature = ElasticFeature(replica, self._ledger)

    @property
    def first_rank(self) -> int:
        return self._replica.first_rank

    def join(self) -> None:
        check_replica(self.run.read_recipe(), self.link)
        join_replica(self._replica, self._replica.rank_info(self.info), self.link)

    def context(self, journal: Journal, cache: Path, stop: StopRequest, change_file: ChangeFile) -> RankContext:
        """Return what the parts of this rank are built from. The loop asks for stops and changes between rounds."""
        recipe, plan = self._replica.recipe(self.run.read_recipe()), self._replica.plan(self._plan)
        return RankContext(
            run=self.run,
            rank_info=self._replica.rank_info(self.info),
            journal=journal,
            cache=cache,
            recipe=recipe,
            plan=plan,
            features=(*features_of(plan, recipe, without=[LOCAL_STEPS]), self._feature),
            link=self.link,
        )

    def begin(self, parts: WorkerParts, stop: StopRequest, change_file: ChangeFile) -> ElasticTraining:
        """Restore the newest state, or get it from a replica that trains already; return the training from there."""
        loop = build_elastic_loop(parts, self._feature, self._ledger, self._replica, self.info.rank, stop, change_file)
        return ElasticTraining(parts, loop, change_file)
