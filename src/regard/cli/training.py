"""What `regard train` runs once its arguments are understood."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regard.cli.shared import two_languages
from regard.translation.corpus import Pair, read_pairs
from regard.translation.distributed import join_world
from regard.translation.plan import Plan
from regard.translation.progress import display
from regard.translation.training import train


def run(
    output: Path,
    plan: Plan,
    source: str | None,
    target: str | None,
    *,
    dev: tuple[str, str] | None,
    form: str | None,
    swap: bool,
    languages: str,
    resume: bool,
    shard: bool,
) -> bool:
    """Train; whether it came to its end."""
    pairs, held = _corpus(source, target, form, languages)
    if dev is not None:
        held = read_pairs(*dev)
    if swap:
        pairs, held = _swapped(pairs), _swapped(held)
    with join_world(shard=shard) as world:
        listeners = [display()] if world.rank == 0 else []
        outcome = train(output, pairs, dev=held, plan=plan, resume=resume, listeners=listeners, world=world)
    return outcome.finished


def _corpus(
    source: str | None, target: str | None, form: Any, languages: str
) -> tuple[Iterable[Pair] | None, Iterable[Pair] | None]:
    """The pairs that were asked for, and those to judge by if they come along."""
    if source is None:
        return None, None
    if source in ("embedded", "bible") and target is None and not Path(source).exists():
        return _embedded(languages) if source == "embedded" else (_bible(), None)
    return read_pairs(source, target, form=form), None


def _embedded(languages: str) -> tuple[Iterable[Pair], Iterable[Pair]]:
    from regard.translation.embedded import embedded

    corpus = embedded(*two_languages(languages))
    return corpus.train, corpus.dev


def _bible() -> Iterable[Pair]:
    from regard.translation.bible import bible

    return [verse.pair for verse in bible()]


def _swapped(pairs: Iterable[Pair] | None) -> Iterable[Pair] | None:
    return None if pairs is None else (Pair(target, source) for source, target in pairs)
