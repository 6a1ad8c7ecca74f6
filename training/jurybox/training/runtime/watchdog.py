"""Find roles that hang, and what others wait for, from the scoreboard alone, so it can be tested without a process.

A role hangs when it gives no sign of life. Roles that wait for each other do give signs, so a wait that lasts too long
is followed along the plan (who adds what this learner wants? who publishes what this actor wants?) to the one that
holds things up: one that hangs or is away, one that runs and still brings nothing, or, in a circle, the one that has
waited longest. That one is restarted.
"""

from __future__ import annotations

from dataclasses import dataclass

from jurybox.training.runtime.plan import Kind, Plan
from jurybox.training.runtime.scoreboard import AT_REST, ControlWord, RunScoreboard, State, Subject, Word


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that the watchdog found.

    Attributes:
        role: number of the one to be restarted.
        text: the reason: which role waits for which, for what, since when.
    """

    role: int
    text: str


def examine(plan: Plan, scoreboard: RunScoreboard, now: int, since: int = 0) -> Alarm | None:
    """The first role that should be restarted; None while all is well.

    Args:
        now: nanoseconds of CLOCK_MONOTONIC.
        since: when the orchestrator last went on after it had been stopped, likewise. What came before does not count:
            the roles may have been stopped, too, as by `docker pause`.
    """
    timeouts = plan.timeouts
    for number, role in enumerate(plan.roles):
        words = scoreboard.words[number]
        state = State(words[Word.STATE])
        most, what, setting = timeouts.of(role.kind), "has given no sign of life", ""
        if state is State.STARTING:
            began = scoreboard.orders[number][ControlWord.STARTED_AT]
            most, what = timeouts.start, "has been starting"
        elif state is not State.RUNNING:
            continue
        elif began := words[Word.RESETS_SINCE]:
            most, what, setting = timeouts.reset, "has been resetting an environment", " (reset_timeout)"
        else:
            began = words[Word.HEARTBEAT]
        if (took := (now - max(began, since)) / 1e9) > most:
            return Alarm(number, f"{role.name} {what} for {took:.0f} s; at most {most:g} s are given{setting}")
    stalled = [number for number in range(len(plan.roles)) if _stalls(plan, scoreboard, number, now, since)]
    if not stalled:
        return None
    first = min(stalled, key=lambda number: scoreboard.words[number][Word.WAITS_SINCE])
    return _blame(plan, scoreboard, first, now, since)


def providers(plan: Plan, scoreboard: RunScoreboard, number: int) -> list[int]:
    """Which roles can end the wait of role `number`."""
    subject, which = scoreboard.waits_for(number)
    match subject:
        case Subject.STEPS:
            return plan.of_kind(Kind.ACTOR, Kind.TRAINER)
        case Subject.READY:
            wanted = set(plan.roles[number].samples)
            return [other for other, role in enumerate(plan.roles) if wanted & set(role.writes)]
        case Subject.LEARNERS:
            learners = plan.of_kind(Kind.LEARNER)
            fewest = min((scoreboard.words[each][Word.LEARNER_STEPS] for each in learners), default=0)
            return [each for each in learners if scoreboard.words[each][Word.LEARNER_STEPS] == fewest]
        case Subject.WEIGHTS:
            name = plan.channels[which].name
            return [other for other, role in enumerate(plan.roles) if role.publishes == name]
    return []


def _stalls(plan: Plan, scoreboard: RunScoreboard, number: int, now: int, since: int) -> bool:
    subject, _ = scoreboard.waits_for(number)
    words = scoreboard.words[number]
    if subject in AT_REST or words[Word.STATE] != State.RUNNING:
        return False
    # A role that was just started gets its time as well, before another counts as the reason; a start may take longer
    # than a stall, so that time counts from its end.
    starts = (orders[ControlWord.STARTED_AT] for orders in scoreboard.orders)
    began = max([since, words[Word.WAITS_SINCE], *starts, *(each[Word.READY_AT] for each in scoreboard.words)])
    return (now - began) / 1e9 > plan.timeouts.stall


def _blame(plan: Plan, scoreboard: RunScoreboard, number: int, now: int, since: int) -> Alarm | None:
    chain = [number]
    while True:
        candidates = providers(plan, scoreboard, chain[-1])
        if not candidates:
            culprit = chain[-1]
            break
        if any(_has_its_time(scoreboard, each) for each in candidates):
            return None
        provider = next((each for each in candidates if scoreboard.waits_for(each)[0] in AT_REST), candidates[0])
        if scoreboard.waits_for(provider)[0] in AT_REST:
            if (now - max(scoreboard.words[provider][Word.MOVED_AT], since)) / 1e9 < plan.timeouts.stall:
                return None  # it is only slow
            culprit = provider
            chain.append(provider)
            break
        if provider in chain:
            circle = chain[chain.index(provider) :]
            culprit = min(circle, key=lambda each: scoreboard.words[each][Word.WAITS_SINCE])
            break
        chain.append(provider)
    waits = "; ".join(_describe_wait(plan, scoreboard, each, now) for each in chain)
    return Alarm(culprit, f"nothing moves: {waits}; {plan.roles[culprit].name} is restarted")


def _has_its_time(scoreboard: RunScoreboard, number: int) -> bool:
    """Whether a role is being restarted, or resets an environment, for which there are time-outs of their own."""
    words = scoreboard.words[number]
    return words[Word.STATE] in (State.STARTING, State.ABSENT) or bool(words[Word.RESETS_SINCE])


def _describe_wait(plan: Plan, scoreboard: RunScoreboard, number: int, now: int) -> str:
    subject, which = scoreboard.waits_for(number)
    name = plan.roles[number].name
    if subject in AT_REST:
        return f"{name} does not wait, and has made {_steps(scoreboard, number)} steps"
    seconds = (now - scoreboard.words[number][Word.WAITS_SINCE]) / 1e9
    what = {
        Subject.STEPS: "environment steps",
        Subject.LEARNERS: "learners that are behind",
        Subject.READY: f"rows in {', '.join(plan.roles[number].samples)}",
        Subject.OUTSIDE: "something outside the run",
    }.get(subject, f"weights on {plan.channels[which].name}" if plan.channels else "weights")
    whom = ", ".join(plan.roles[other].name for other in providers(plan, scoreboard, number)) or "nobody"
    return f"{name} has waited {seconds:.1f} s for {what}, on {whom}"


def _steps(scoreboard: RunScoreboard, number: int) -> int:
    return scoreboard.words[number][Word.ENV_STEPS] + scoreboard.words[number][Word.LEARNER_STEPS]
