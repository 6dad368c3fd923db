"""What is answered: the JSON of every response."""

from typing import Any, Literal

from msgspec import Struct


class Answer(Struct):
    """Base of all that is answered.

    >>> from regard.app.server.schema import Problem
    >>> Problem(error="nobody knows")
    Problem(error='nobody knows')
    """


class Problem(Answer, kw_only=True):
    """What is wrong, in one sentence with its cure."""

    error: str


class Health(Answer, kw_only=True):
    """Whether the server is well."""

    status: Literal["ok"] = "ok"
    version: str
    models: int
    waiting: int


class Model(Answer, kw_only=True):
    """A model that was named at the start."""

    name: str
    kind: Literal["translator", "encoder"]
    about: str
    attends: bool
    layers: int
    heads: int
    longest: int | None
    languages: str
    examples: list[str]


class Recording(Answer, kw_only=True):
    """What a model was seen to do, somewhere else: an exhibit that is always kept."""

    name: str
    id: str
    about: str


class Models(Answer, kw_only=True):
    """What there is: models, the names of folders with the log of a training, and recordings.

    pending: the names of models that are still being trained, and will be among the models.
    """

    models: list[Model]
    pending: list[str]
    folders: list[str]
    recordings: list[Recording]


class Aligned(Answer, kw_only=True):
    """Which target word came from which source word: weights of target words × source words."""

    source_words: list[str]
    target_words: list[str]
    links: str
    weights: list[list[float]]


class Alignments(Answer, kw_only=True):
    """The alignment of each pair."""

    alignments: list[Aligned]


class Alternative(Answer, kw_only=True):
    """Another translation."""

    text: str
    score: float


class Translation(Answer, kw_only=True):
    """A sentence and its translation; reason: why there is no alignment although it was asked for."""

    source: str
    text: str
    score: float
    tokens: list[str]
    note: str
    alternatives: list[Alternative]
    alignment: Aligned | None
    reason: str


class Text(Answer, kw_only=True):
    """The tokens of one side, and the places of those that are marks."""

    tokens: list[str]
    special: list[int]


class Layer(Answer, kw_only=True):
    """An attention that can be asked about; queries and keys are numbers of texts."""

    name: str
    label: str
    kind: Literal["self", "cross", "words"]
    heads: int
    queries: int
    keys: int
    vectors: bool


class Input(Answer, kw_only=True):
    """What went through the model at once."""

    title: str
    note: str
    texts: list[Text]
    layers: list[Layer]


class Described(Answer, kw_only=True):
    """What there is to see in an exhibit."""

    title: str
    inputs: list[Input]


class Shown(Answer, kw_only=True):
    """An exhibit, which is kept for a while under its id."""

    id: str
    exhibit: Described


class Translations(Answer, kw_only=True):
    """The translations in the order of the sentences, and what can be looked at, if that was asked for."""

    translations: list[Translation]
    exhibit: Shown | None


class Words(Answer, kw_only=True):
    """The words of a sentence and a vector for each."""

    words: list[str]
    vectors: list[list[float]]


class Embedded(Answer, kw_only=True):
    """The words of each sentence."""

    layer: int
    sentences: list[Words]


class Comparison(Answer, kw_only=True):
    """The cosine of two words at each layer; reason: why a model has none."""

    model: str
    words: list[str]
    similarities: list[float]
    best_layer: int
    reason: str


class Comparisons(Answer, kw_only=True):
    """The comparison of each model."""

    comparisons: list[Comparison]


class AttendedWord(Answer, kw_only=True):
    """A word or a mark, and the weight it gets."""

    word: str
    weight: float


class AttendedWords(Answer, kw_only=True):
    """The words of the sentence with the weights that a word gives them."""

    attended: list[AttendedWord]


class Formula(Answer, kw_only=True):
    """How the three steps are written."""

    score: str
    normalize: str
    output: str


class LookedUp(Answer, kw_only=True):
    """Attention, step by step; scores are those before the mask and the temperature."""

    scores: list[list[float]]
    masked: list[list[bool]]
    weights: list[list[float]]
    output: list[list[float]]
    tau: list[float]
    formula: Formula


class Ordered(Answer, kw_only=True):
    """What became of each word when the order changed; change: of the words in their first order."""

    words: list[str]
    shuffled: list[str]
    before: list[list[float]]
    after: list[list[float]]
    change: list[float]
    weights_before: list[list[float]]
    weights_after: list[list[float]]


class Encoding(Answer, kw_only=True):
    """A table of numbers; start: what the first column stands for."""

    values: list[list[float]]
    rows: str
    columns: str
    start: int


State = Literal["running", "finished", "stopped"]


class Training(Answer, kw_only=True):
    """A training that has left a log; stopped: before the end that its plan asks for."""

    name: str
    steps: int
    state: State


class Trainings(Answer, kw_only=True):
    """The trainings of the folders that were named at the start."""

    trainings: list[Training]


class Row(Answer, kw_only=True):
    """A row of a log."""

    step: int
    loss: float | None
    dev_loss: float | None
    dev_bleu: float | None
    rate: float | None
    tokens_per_second: float | None
    seconds: float | None


class Sample(Answer, kw_only=True):
    """A sentence of the dev data as it was translated at a step."""

    step: int
    source: str
    text: str
    reference: str
    alignment: Aligned | None


class TrainingRows(Answer, kw_only=True):
    """What a training has logged after some step, its samples, and how far it has come by now."""

    steps: int
    state: State
    rows: list[Row]
    samples: list[Sample]


class Array(Answer, kw_only=True):
    """Numbers: their shape, and the float32s, little-endian, in base64."""

    shape: list[int]
    data: str


class NoFacts(Answer, kw_only=True):
    """Nothing beside the arrays."""


class Places(Answer, kw_only=True):
    """Places of tokens and their weights, the largest first."""

    places: list[int]
    weights: list[float]


class HeadFacts(Answer, kw_only=True):
    """What a head does."""

    head: int
    label: str
    measures: dict[str, float]


class HeadsFacts(Answer, kw_only=True):
    """What each head does."""

    heads: list[HeadFacts]


class NumbersFacts(Answer, kw_only=True):
    """How one weight comes about."""

    query: list[float | None]
    key: list[float | None]
    scale: float
    bias: float | None
    softcap: float | None
    score: float | None
    masked: bool
    tau: float | None
    weight: float
    normalizer: str
    formula: str


class Told(Answer, kw_only=True):
    """What an exhibit answers: facts and arrays."""

    facts: dict[str, Any]
    arrays: list[Array]


class TileTold(Answer, kw_only=True):
    """Means of weights, a matrix for each head."""

    facts: NoFacts
    arrays: list[Array]


class PlacesTold(Answer, kw_only=True):
    """Places with their weights, and perhaps all weights in bins."""

    facts: Places
    arrays: list[Array]


class HeadsTold(Answer, kw_only=True):
    """What the heads do, with a small picture of each."""

    facts: HeadsFacts
    arrays: list[Array]


class NumbersTold(Answer, kw_only=True):
    """How one weight comes about."""

    facts: NumbersFacts
    arrays: list[Array]
