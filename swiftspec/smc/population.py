"""The groups of particles of mode smc: the host's side. What the device does alone is smc/round.py.

A request is admitted where one of G sequences is free: its prompt is read once, into that sequence, and N particles fan
out from it. From then on it takes part in every round until all its particles have finished, and leaves by itself; what
stays of it is an answer, and the next request takes its place. A request alone is a batch of one group.

The host starts rounds and counts slots, N (K + 1) a round and group, which needs no reading. What it wants to know (who
has finished, which slots are free, what all particles of a group share) it reads from a copy, a round late where the
device runs ahead. Letters: G groups of N particles, K draft tokens a round. Source: SMC-SD engine v0.1 sections 3.1,
3.2 and 3.5, v0.2 section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from numpy.typing import NDArray

from swiftspec.config import PopulationConfig
from swiftspec.errors import NotFinite
from swiftspec.messages import Opening
from swiftspec.runtime.executors import choose, features
from swiftspec.runtime.executors.population_rounds import Mail, Rounds
from swiftspec.runtime.runner import Runner
from swiftspec.smc import weights
from swiftspec.smc.group_result import Answer, Particle
from swiftspec.smc.particles import LIVE, SHARED
from swiftspec.smc.prefix_reuse import Texts
from swiftspec.smc.round import SMCRound

WHOSE = "the target's or the draft's"  # logits are no numbers


@dataclass(slots=True, eq=False)
class Group:
    """One request, as the host sees it from admission to answer."""

    sequence: int  # of the cache, its own until it leaves
    steps: Rounds  # that run it, and all that those before them run
    prompt: Sequence[int]
    kept: int  # tokens of the prompt that were kept from earlier ones
    settled: int  # tokens of prompt and answer that are known to be in the cache's prefix
    last: int  # rounds that it can have at most
    due: int  # tree slots in use from which compaction is worth its while
    used: int = 1  # tree slots handed out
    rounds: int = 0
    tokens: list[int] = field(default_factory=list)  # that all particles share, as far as is known
    done: bool = False  # every particle has finished
    columns: NDArray | None = None  # what its slots were in the last round that is known of; None since a compaction
    full: bool = False  # the cache has no room for another round
    broken: bool = False  # its logits or weights are no numbers
    accepted: list[int] = field(default_factory=list)  # draft tokens that stayed, round by round
    compactions: int = 0
    moved_slots: int = 0
    answer: Answer | None = None  # once a particle is picked

    @property
    def over(self) -> bool:
        """Whether it needs no further round."""
        return self.done or self.full or self.broken or self.rounds == self.last


@dataclass(frozen=True, slots=True)
class Told:
    """A group in a round: how many of its tree slots were in use, and how many compactions had numbered them."""

    group: Group
    used: int
    compactions: int


class SMC:
    """The worker of mode smc: both models and up to G groups. `lag`: rounds that the host is behind the device.

    In a group of ranks each has its shares of both models; the logits are gathered, so that everything else happens on
    all of them alike.
    """

    def __init__(
        self, target: Runner, draft: Runner, steps: Sequence[Rounds], config: PopulationConfig, *, longest: int,
        lag: int = 0, keep: bool = True,
    ) -> None:  # fmt: skip
        """`steps`: those that run rounds of both models, the fastest first. `keep`: what was read is not read again."""
        self.target, self.draft, self.config = target, draft, config
        self.steps_known = steps
        self.lag = lag
        if config.smc_groups > 1:
            for runner in (target, draft):
                runner.cache.reset(config.smc_groups)
        self.round = SMCRound(target, draft, config, longest)
        self.particles = self.round.particles
        self._slots = self.particles.mask.shape[-1]  # of each group's tree region
        self._texts = Texts([target.cache, draft.cache], keep)
        self.groups: list[Group] = []  # as they were admitted
        self._order = [*range(config.smc_groups)]  # which sequence's group has which position among the particles
        self._told: deque[tuple[list[Told], Mail]] = deque()

    @property
    def busy(self) -> tuple[float, float]:
        return self.target.busy, self.draft.busy

    @property
    def drafted(self) -> int:
        """Draft tokens of a group's round."""
        return self.config.particles * self.config.smc_draft_tokens

    @property
    def exact(self) -> bool:
        """Whether its texts follow the target's law: chains, each verified."""
        return self.config.chains is not None

    @property
    def places(self) -> int:
        """How many requests can be decoded at once."""
        return self.config.smc_groups

    @property
    def has_room(self) -> bool:
        """Whether another request can be admitted."""
        return len(self.groups) < self.places

    def choose(self, opening: Opening) -> Rounds:
        """The steps that run a request."""
        return choose(self.steps_known, features(opening.sampling, "population"), opening.steps)

    def admit(self, opening: Opening, stops: Collection[int], limit: int) -> Group:
        """Reads the prompt once on both models and fans out; the other groups stay where they are. Texts end at a token
        of `stops` or after `limit`. There must be room, and `check_sampling` have let the request pass."""
        assert self.has_room
        steps = self.choose(opening)
        sequence, kept = self._read_prompt(opening)
        self.round.open(self._order.index(sequence), opening.tokens, opening.sampling, stops, limit)
        # without rejections every particle grows by K + 1 tokens a round, so that the last round is known beforehand
        last = limit if self.round.rejects(opening.sampling) else -(-limit // self.particles.step)
        prefix = len(opening.tokens) - 1
        group = Group(sequence, steps, opening.tokens, kept, prefix, last, due=2 * self.config.slots)
        self.groups.append(group)
        return group

    def launch(self) -> bool:
        """Starts a round of all groups that need one. False where none does, or for none one fits (`Group.full`)."""
        going = [group for group in self.groups if not group.over and self._has_slots(group)]
        going = [group for group in going if not group.over]  # to have slots, mail was read, of all groups
        if not going:
            return False
        going.sort(key=lambda group: group.sequence)
        self._put_first([group.sequence for group in going])
        for group in going:
            group.used += self.config.slots
            group.rounds += 1
        steps = max((group.steps for group in going), key=self.steps_known.index)
        count = steps.groups(len(going), self.config.smc_groups)
        if count > len(going):
            for group in self.groups:
                if group not in going:  # it has just come to its end, and picks before a round runs over it
                    with suppress(NotFinite):
                        self.finish(group)
            self.particles.idle(slice(len(going), count))
        width = min(steps.window(max(group.used for group in going)), self._slots)
        told = [Told(group, group.used, group.compactions) for group in going]
        self._told.append((told, steps.round(self.round, width, count)))
        return True

    def collect(self) -> None:
        """Takes in what is known by now: the last round's outcome, or that of the one `lag` rounds before."""
        while len(self._told) > self.lag:
            self._take_in()

    def finish(self, group: Group) -> Answer:
        """Picks one particle of a group, once. Waits for the device. Raises NotFinite where there is none to pick."""
        self._take_in_all_of(group)
        if group.broken:
            raise NotFinite(WHOSE)
        if group.answer is None:
            group.answer = self._pick(group)
        return group.answer

    def leave(self, group: Group) -> None:
        """Ends a request, wherever it stands, and frees its place. What has settled stays in the cache."""
        if group in self.groups:
            self._take_in_all_of(group)  # what it has left in its sequence may have to be wiped
            self.groups.remove(group)
            self._texts.hold(group.sequence, [*group.prompt, *group.tokens][: group.settled])
            self.particles.drop(self._order.index(group.sequence))

    def _pick(self, group: Group) -> Answer:
        at, p, rounds = self._order.index(group.sequence), self.particles, max(group.rounds, 1)
        uniform, lengths = self.round.streams.pick(at), p.length[at].tolist()
        row, shares = weights.pick(p.log_weights[at].tolist(), uniform)
        texts = zip(p.tokens[at, :, : max(lengths)].tolist(), lengths, strict=True)
        found = zip(texts, p.stopped[at].tolist(), shares, strict=True)
        particles = tuple(Particle(tuple(text[:n]), stopped, share) for (text, n), stopped, share in found)
        return Answer(
            tokens=[*particles[row].tokens],
            stopped=particles[row].stopped,
            coalesced_prefix=len(group.tokens),
            ess_mean=float(p.ess[at]) / rounds,
            resample_rate=int(p.resampled[at]) / rounds,
            log_z=float(p.evidence()[at]),
            full=group.full,
            compactions=group.compactions,
            moved_slots=group.moved_slots,
            particles=particles,
            uniform=uniform,
        )

    def _read_prompt(self, opening: Opening) -> tuple[int, int]:
        """Into a free sequence of both caches. Returns it, and how many tokens were kept from earlier requests."""
        tokens = opening.tokens
        if self.places == 1:
            return 0, min(runner.open(tokens, most=opening.kept) for runner in (self.target, self.draft))
        sequence, kept = self._texts.begin(tokens, [group.sequence for group in self.groups])
        for runner in (self.target, self.draft):
            runner.prefill(tokens[kept:-1], [sequence])
        self._texts.hold(sequence, tokens[:-1])
        return sequence, kept

    def _put_first(self, sequences: list[int]) -> None:
        """Has the groups of these sequences at the first positions, where a round runs over them, in that order."""
        if self._order[: len(sequences)] != sequences:
            order = [*self._order]
            for place, sequence in enumerate(sequences):
                other = order.index(sequence)
                order[place], order[other] = sequence, order[place]
            self.round.rearrange([self._order.index(sequence) for sequence in order])
            self._order = order

    def _has_slots(self, group: Group) -> bool:
        """Whether another round of a group fits, after a compaction where that is due."""
        most = self._slots - self.config.slots
        if group.used >= group.due:
            self._compact(group)
        if group.used > most:
            self._take_in_all_of(group)  # there may be more to drop than is known
            self._compact(group)
        group.full = group.used > most
        return not group.full

    def _take_in_all_of(self, group: Group) -> None:
        """What its rounds have left. Waits for the device."""
        while any(about.group is group for told, _ in self._told for about in told):
            self._take_in()

    def _take_in(self) -> None:
        """The oldest mail."""
        told, mail = self._told.popleft()
        with self.target.naming_lost():
            heads = mail.read()
        for about, head in zip(told, heads, strict=False):  # of idle groups nobody wants to know
            group = about.group
            common, finished, accepted = head[:3].tolist()
            if common < 0:
                group.broken = True
                self._wipe(group)
            elif not group.done:  # a round too many may have begun before that was known
                group.tokens += head[3 + len(group.tokens) : 3 + common].tolist()
                group.done = finished == self.config.particles
                group.accepted.append(accepted)
                if about.compactions == group.compactions:
                    group.columns = head[self.round.told :][: about.used]

    def _wipe(self, group: Group) -> None:
        """Forgets a group in the caches: NaN would spoil the sums of a later request, even where it is masked."""
        for cache in (self.target.cache, self.draft.cache):
            for part in (cache.k, cache.v):
                part[:, group.sequence, :, : cache.prefix_len[group.sequence] + group.used].zero_()
            cache.prefix_len[group.sequence] = 0

    def _compact(self, group: Group) -> None:
        """Promotes the slots that all live rows share to the prefix and drops those that nobody holds, as far as that
        is known: what rounds have handed out since stays. Waits for nothing. Now and then: at the earliest when as many
        slots as survived, or two rounds', have been handed out."""
        if group.columns is None:
            return
        path = (group.columns == SHARED).nonzero()[0].tolist()
        keep = [*(group.columns == LIVE).nonzero()[0].tolist(), *range(len(group.columns), group.used)]
        group.due = len(keep) + max(len(keep), 2 * self.config.slots)
        if len(path) + len(keep) == group.used and not path:
            return  # nothing to gain
        for runner in (self.target, self.draft):
            runner.cache.promote(group.sequence, path, keep)
        group.steps.compact(self.round, self._order.index(group.sequence), path, keep)
        # the path is in the text of those that go on, and so is what all share
        group.settled = min(group.settled + len(path), len(group.prompt) + len(group.tokens))
        group.used, group.columns = len(keep), None
        group.compactions += 1
        group.moved_slots += sum(slot != place for place, slot in enumerate([*path, *keep]))
