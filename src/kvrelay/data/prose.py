"""A grammar of plain English: endless small stories about people, places and things.

Owns the words and the sentence patterns. Everything is drawn from the ``random.Random`` that the caller hands in, so
the same seed gives the same text. Knows nothing of tokens: the length of a text is up to the caller.
"""

from __future__ import annotations

from random import Random

import msgspec

SHE_NAMES = (
    "Ann", "Amy", "Eva", "Ida", "Ivy", "Joy", "Kim", "Lea", "Lily", "Lucy", "Mary", "Mia", "Nora", "Olga", "Pam",
    "Rita", "Rosa", "Ruth", "Sara", "Sue", "Tess", "Uma", "Vera", "Wendy", "Zoe", "Nina", "Emma", "Jane", "Kate",
    "Dora",
)  # fmt: skip
HE_NAMES = (
    "Adam", "Alan", "Ben", "Bill", "Carl", "Dan", "Eric", "Finn", "Fred", "Gus", "Hugo", "Ian", "Ivan", "Jack", "Jim",
    "John", "Karl", "Leo", "Luke", "Mark", "Max", "Nick", "Noah", "Omar", "Otto", "Paul", "Pete", "Ray", "Sam", "Tom",
)  # fmt: skip
NAMES = SHE_NAMES + HE_NAMES

PLACES = ("market", "garden", "harbour", "library", "forest", "river", "bridge", "school", "station", "park")
JOBS = (
    ("baker", "makes bread"),
    ("farmer", "grows apples"),
    ("teacher", "teaches children"),
    ("doctor", "helps people"),
    ("sailor", "sails boats"),
    ("painter", "paints houses"),
    ("gardener", "plants flowers"),
    ("cook", "makes soup"),
)
THINGS = ("hat", "book", "map", "lamp", "coat", "box", "cup", "letter", "clock", "bag", "basket", "ring")
FOODS = ("bread", "apples", "soup", "cheese", "cake", "honey", "fish", "tea")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
SIZES = ("small", "big", "new", "little")
WEATHERS = ("sunny", "cold", "warm", "windy", "rainy", "quiet")
TIMES = ("morning", "evening", "day", "night", "afternoon")
FEELINGS = ("happy", "tired", "sad", "hungry", "glad")
UNDER = ("under the table", "behind the door", "on the bridge", "near the river", "in the garden", "on the old bench")
ANIMALS = ("dog", "cat", "horse", "bird")


class Person(msgspec.Struct, frozen=True):
    """A character: a name and the pronouns that go with it."""

    name: str
    he: str
    him: str
    his: str


def person(name: str) -> Person:
    """The character of that name, which is one of ``NAMES``."""
    if name in SHE_NAMES:
        return Person(name, "she", "her", "her")
    return Person(name, "he", "him", "his")


def thing(rng: Random) -> str:
    """A thing with an adjective, such as ``red hat``. No article: all adjectives take "a"."""
    return f"{rng.choice(COLOURS if rng.random() < 0.7 else SIZES)} {rng.choice(THINGS)}"


def sentence(rng: Random) -> str:
    """One sentence that stands for itself, with a full stop and without spaces around it."""
    who = person(rng.choice(NAMES))
    place, time = rng.choice(PLACES), rng.choice(TIMES)
    patterns = (
        f"{who.name} walks to the {place} every {time}.",
        f"The {rng.choice(SIZES)} {rng.choice(ANIMALS)} sleeps near the {place}.",
        f"It is a {rng.choice(WEATHERS)} {time}.",
        f"{who.name} has a {thing(rng)}.",
        f"{who.name} likes {rng.choice(FOODS)} and {rng.choice(FOODS)}.",
        f"There is a {thing(rng)} {rng.choice(UNDER)}.",
        f"{who.name} sees a {rng.choice(ANIMALS)} near the {place}.",
        f"The {place} is {rng.choice(WEATHERS)} in the {time}.",
        f"{who.name} wants to buy a {thing(rng)}.",
        f"People at the {place} talk about the {rng.choice(WEATHERS)} {time}.",
        f"{who.name} is {rng.choice(FEELINGS)} because {who.he} has a {thing(rng)}.",
    )
    return rng.choice(patterns)


def story(rng: Random, hero: str | None = None) -> str:
    """A story of 5 to 12 sentences about ``hero`` (one of ``NAMES``; drawn if None), sentences apart by a space."""
    who = person(hero or rng.choice(NAMES))
    friend = person(rng.choice([name for name in NAMES if name != who.name]))
    job, work = rng.choice(JOBS)
    parts = [
        rng.choice((f"{who.name} is a {job}.", f"Once there was a {job} named {who.name}.")),
        rng.choice(
            (
                f"{who.he.capitalize()} lives in a {rng.choice(SIZES)} house near the {rng.choice(PLACES)}.",
                f"Every {rng.choice(TIMES)} {who.he} {work} and {who.he} is {rng.choice(FEELINGS)}.",
                f"{who.he.capitalize()} has a {rng.choice(ANIMALS)} and a {thing(rng)}.",
            )
        ),
    ]
    parts += _visit(rng, who, friend)
    for _ in range(rng.randrange(2)):
        parts += _visit(rng, friend, who)
    parts.append(
        rng.choice(
            (
                f"In the evening they ate {rng.choice(FOODS)} and talked about the {rng.choice(PLACES)}.",
                f"Then they went home, and {who.name} was {rng.choice(FEELINGS)}.",
                f"That night {who.name} slept well.",
                f"After that {who.name} and {friend.name} were good friends.",
            )
        )
    )
    return " ".join(parts)


def _visit(rng: Random, who: Person, friend: Person) -> list[str]:
    """An episode: ``who`` meets ``friend``, and something small happens."""
    what, animal = thing(rng), rng.choice(ANIMALS)
    meeting = f"One {rng.choice(WEATHERS)} {rng.choice(TIMES)} {who.name} went to the {rng.choice(PLACES)}"
    episodes = (
        [
            f"{meeting} and met {friend.name}.",
            f"{friend.name} was sad because {friend.he} had lost a {what}.",
            f"{who.name} helped {friend.him} to look for it.",
            f"They found the {what} {rng.choice(UNDER)}.",
        ],
        [
            f"{meeting} to buy {rng.choice(FOODS)}.",
            f"There {who.he} saw {friend.name} with a {what}.",
            f'"I like your {what}," said {who.name}.',
            f'"Thank you," said {friend.name}. "You can have it."',
        ],
        [
            f"{meeting}.",
            f"{who.he.capitalize()} found a {what} {rng.choice(UNDER)}.",
            f"{who.name} gave the {what} to {friend.name}, and {friend.name} was {rng.choice(('happy', 'glad'))}.",
        ],
        [
            f"{meeting} with {friend.name}.",
            f"They saw a {rng.choice(SIZES)} {animal} {rng.choice(UNDER)}.",
            f"The {animal} took the {what} of {friend.name}, and {who.name} ran after it.",
        ],
    )
    return list(rng.choice(episodes))
