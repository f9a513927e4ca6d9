"""What one request may say next, and how likely each token of that is.

A cursor follows one corpus: the request's own tokens, its prediction, or earlier outputs of its group.  Every token
that the request gets is compared with the one at the cursor, whether that was drafted or not, so the estimates cost no
drafts.  Where the output leaves the corpus the cursor stays aligned, as one token was exchanged for another, until a
search for the last tokens finds a better place or it has been wrong a few times in a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokserve.features.speculation.token_index import MAX_MATCH, SEPARATOR, TokenIndex

# by how many tokens in a row the cursor was right, up to MAX_MATCH
_LEVEL = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 6)
# the probability of the next token, by level, before anything is known of the request
_EXPECTED = (0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 0.95)  # of a prediction, or an output of the same seed
_MATCHED = (0.15, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9)  # of other texts
_PRIOR_WEIGHT, _MIN_RATE = 3, 0.06
_START_WEIGHT = 1  # where a text is expected: one that is wrong at once is rarely right later
_SURE = 8  # tokens; a cursor that was right so often in a row is not searched for
_UNTRIED = 8  # drafts of a request of which no token was foreseen or missed yet, at most
_MAX_MISSES = 4  # in a row, after which a cursor is given up
_CATCH_UP = 4096  # positions that one call indexes, about a millisecond
MIN_PROBABILITY = 0.02  # of a draft and all before it
_MIN_DRAWN_RATE = 0.03  # of a new drawn draft in a request's moving average


class Corpus:
    """Tokens to follow.  `name`: the source, for reports.  `expected`: its text is expected, not only possible."""

    __slots__ = ("expected", "index", "name")

    def __init__(self, name: str, index: TokenIndex, *, expected: bool = False) -> None:
        self.name = name
        self.index = index
        self.expected = expected


class DraftState:
    """The cursor of one request.  `corpora`: the first of several equally likely places wins; `start`: the corpus and
    the position that the output is expected to follow from its first token on, as likely as if `trust` tokens had been
    right already; `searches`: in its own tokens, too."""

    def __init__(
        self,
        tokens: array[int],
        prompt_len: int,
        corpora: Sequence[Corpus],
        start: tuple[Corpus, int] | None = None,
        *,
        trust: int = 0,
        searches: bool = True,
    ) -> None:
        self._tokens = tokens
        self._known = prompt_len
        self._own = Corpus("prompt", TokenIndex(tokens))
        self._corpora = [*corpora, *([self._own] if searches else [])]
        self._estimates = {
            True: [[p, _PRIOR_WEIGHT if level else _START_WEIGHT] for level, p in enumerate(_EXPECTED)],
            False: [[p, _PRIOR_WEIGHT] for p in _MATCHED],
        }
        self._corpus: Corpus | None = None
        self._position = self._matched = self._misses = 0
        self._is_tried = start is None
        self.num_hits = 0  # tokens that were at the cursor
        if start is not None:
            self._corpus, self._position = start
            self._matched = trust

    @property
    def source(self) -> str:
        """Where the drafts of now come from."""
        return "" if self._corpus is None else self._corpus.name

    def advance(self) -> None:
        """Follow the tokens that are new since the last call, and look for a better place."""
        tokens, known = self._tokens, self._known
        for index in range(known, len(tokens)):
            if self._corpus is None:
                break
            self._compare(self._corpus, tokens[index])
        is_new = len(tokens) > known or not self._own.index.num_indexed
        self._known = len(tokens)
        if is_new and (self._corpus is None or self._matched < _SURE):
            self._search()

    def _compare(self, corpus: Corpus, token: int) -> None:
        text, position = corpus.index.tokens, self._position
        if position >= len(text) or text[position] == SEPARATOR:
            self._corpus = None
            return
        self._is_tried = True
        hit = text[position] == token
        estimate = self._estimates[corpus.expected][_LEVEL[self._matched]]
        estimate[1] += 1
        estimate[0] += ((1.0 if hit else 0.0) - estimate[0]) * max(_MIN_RATE, 1 / estimate[1])
        self._position = position + 1
        if hit:
            self.num_hits += 1
            self._matched = min(self._matched + 1, MAX_MATCH)
            self._misses = 0
            return
        self._matched = 0
        self._misses += 1
        if self._misses >= _MAX_MISSES:
            self._corpus = None

    def _search(self) -> None:
        tokens, best = self._tokens, 0.0
        if self._corpus is not None:
            best = self._estimates[self._corpus.expected][_LEVEL[self._matched]][0]
        for corpus in self._corpora:
            index = corpus.index
            index.catch_up(len(tokens) - 1 if corpus is self._own else len(index.tokens), _CATCH_UP)
            match = index.find(tokens)
            if match is None or match[0] >= len(index.tokens) or index.tokens[match[0]] == SEPARATOR:
                continue
            probability = self._estimates[corpus.expected][_LEVEL[match[1]]][0]
            if probability > best:
                best = probability
                self._corpus, (self._position, self._matched), self._misses = corpus, match, 0

    def probabilities(self, skip: int, limit: int) -> list[float]:
        """That a token and all before it are right, for `limit` tokens at most, after `skip` that are not known yet."""
        corpus = self._corpus
        if corpus is None:
            return []
        if not self._is_tried:
            limit = min(limit, _UNTRIED)
        room = limit if corpus is self._own else min(limit, len(corpus.index.tokens) - self._position - skip)
        estimates, matched, product = self._estimates[corpus.expected], self._matched, 1.0
        likely: list[float] = []
        for count in range(skip + room):
            product *= estimates[_LEVEL[matched]][0]
            if product < MIN_PROBABILITY:
                break
            if matched < MAX_MATCH:
                matched += 1
            if count >= skip:
                likely.append(product)
        return likely

    def drafts(self, skip: int, count: int) -> list[int]:
        """Draft at most `count` tokens, after `skip` that are not known yet."""
        corpus = self._corpus
        if corpus is None:
            return []
        text, start = corpus.index.tokens, self._position
        drafts = text[start : start + skip + count].tolist()
        if corpus is self._own:  # a text that goes on repeating itself
            period = len(text) - start
            while len(drafts) < skip + count:
                drafts.append(drafts[len(drafts) - period])
        elif SEPARATOR in drafts:
            del drafts[drafts.index(SEPARATOR) :]
        return drafts[skip:]


class DrawState:
    """How often a request's drawn drafts are right."""

    __slots__ = ("count", "rate", "tried_at")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.count = _PRIOR_WEIGHT
        self.tried_at = 0  # output tokens when drafts were drawn last

    def record(self, proposed: int, accepted: int) -> None:
        """The drafts of a step were verified; nothing is known of those after the first that was wrong."""
        for hit in [1.0] * accepted + [0.0] * (accepted < proposed):
            self.count += 1
            self.rate += (hit - self.rate) * max(_MIN_DRAWN_RATE, 1 / self.count)
