"""The drafter-free proposers: their text structures against brute force, and every proposer against plain decoding, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine, Generation
from draftsmith.decode.free import (
    Hybrid,
    Lookahead,
    PromptLookup,
    Retrieval,
    SuffixAutomaton,
    TokenRecycling,
    build_datastore,
    load_datastore,
)
from draftsmith.decode.free.datastore import SEPARATOR, Datastore, sort_suffixes
from draftsmith.decode.free.drafts import Trie, continuation
from draftsmith.decode.free.suffix import Automaton
from draftsmith.decode.proposer import Accepted, LogitObserver, Proposer
from draftsmith.decode.sampling import Sampler, SamplingParams
from draftsmith.decode.target import Target
from draftsmith.decode.tree import DraftTree
from draftsmith.recipes.schema import TargetRef
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

VOCAB = 61
# Repetitive prompts, so that something is drafted from the first round on; the second and third make the batch ragged.
PROMPTS = [[5, 9, 33, 2, 5, 9, 33, 2, 5, 9, 33], [7], [44, 3, 3, 18, 44, 3, 3], [12, 6, 6, 6, 19, 12, 6, 6, 6, 19, 50, 51, 12, 6, 6]]
NEW = 32
GREEDY = Sampler([SamplingParams()], "cpu")
CODE = "import os\nimport sys\n" * 3

texts = st.lists(st.integers(0, 2), max_size=40)  # three tokens: long repeats everywhere


@pytest.fixture(scope="module")
def tiny() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that attention matters and text is not constant
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model, None, "llama")


@pytest.fixture(scope="module")
def embedded() -> Target:
    location = TargetRef().location
    return Target(AutoModelForCausalLM.from_pretrained(location, dtype=torch.float64), AutoTokenizer.from_pretrained(location), location)


def sampling(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=20 + row, top_p=0.95) for row in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(tiny: Target) -> dict[float, list[list[int]]]:
    """What plain decoding gives each prompt alone, at each temperature."""
    return {t: [Engine(tiny).generate([p], s, NEW).tokens[0] for p, s in zip(PROMPTS, sampling(t), strict=True)] for t in (0.0, 1.0)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, plain: dict[float, list[list[int]]]) -> Datastore:
    """A datastore that has seen the answers, so that retrieval finds something even in a random model's text."""
    documents = [[*prompt, *answer] for answers in plain.values() for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return build_datastore(documents, tmp_path_factory.mktemp("free") / "store", "a-tokenizer")


class Watched:
    """Passes everything on to a proposer, and looks at every tree."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.taps, self.max_depth, self.num_nodes = inner.taps, inner.max_depth, inner.num_nodes
        self.wants_logits = isinstance(inner, LogitObserver) and inner.wants_logits

    def reset(self, batch: int, capacity: int) -> None:
        self.inner.reset(batch, capacity)

    def observe(self, accepted: Accepted) -> None:
        self.inner.observe(accepted)

    def observe_logits(self, tokens_BN: Tensor, logits_BNV: Tensor, valid_BN: Tensor, parents_BN: Tensor | None = None) -> None:
        assert isinstance(self.inner, LogitObserver)
        self.inner.observe_logits(tokens_BN, logits_BNV, valid_BN, parents_BN)

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        tree = self.inner.propose(root_B, sampler, noise_BDV)
        tree.check_integrity()
        assert tree.num_nodes <= self.num_nodes and tree.max_depth <= self.max_depth
        assert torch.equal(tree.tokens_BN[:, 0], root_B)
        return tree


class Tapped:
    """A proposer that wants features, and drafts nothing but token 0."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps, self.max_depth, self.num_nodes = taps, 1, 2
        self.seen: list[Tensor | None] = []

    def reset(self, batch: int, capacity: int) -> None:
        self.seen = []

    def observe(self, accepted: Accepted) -> None:
        self.seen.append(accepted.taps_BMF)

    def propose(self, root_B: Tensor, sampler: Sampler, noise_BDV: Tensor | None) -> DraftTree:
        return DraftTree.chain(torch.stack([root_B, torch.zeros_like(root_B)], dim=1))


PROPOSERS: dict[str, Callable[[Datastore], Proposer]] = {
    "lookup": lambda store: PromptLookup(5),
    "lookup-tree": lambda store: PromptLookup(5, matches=3, nodes=9),
    "suffix": lambda store: SuffixAutomaton(5),
    "suffix-tree": lambda store: SuffixAutomaton(5, 8, factor=2),
    "retrieval": lambda store: Retrieval(store, 5, 8, min_ngram=1),
    "recycling": lambda store: TokenRecycling.sized(depth=3, nodes=8, topk=3),
    "lookahead": lambda store: Lookahead(4, 3),
    "hybrid": lambda store: Hybrid(Retrieval(store, 4, 4), Lookahead(4, 3), 10),
    "hybrid-nested": lambda store: Hybrid(SuffixAutomaton(4), Hybrid(TokenRecycling.sized(depth=3, nodes=6, topk=3), Tapped((1,)))),
}


def accepted_of(out: Generation) -> int:
    return sum(r.accepted for rounds in out.rounds for r in rounds)


# Every proposer in the engine


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PROPOSERS)
def test_output_is_token_identical_to_plain_decoding(
    name: str,
    temperature: float,
    batch: int,
    tiny: Target,
    plain: dict[float, list[list[int]]],
    store: Datastore,
) -> None:
    proposer = Watched(PROPOSERS[name](store))
    out = Engine(tiny, proposer).generate(PROMPTS[:batch], sampling(temperature)[:batch], NEW)
    assert out.tokens == plain[temperature][:batch]
    if temperature == 0 or "retrieval" in name or name == "hybrid":  # a random model at temperature 1 repeats nothing
        assert accepted_of(out) > 0


@pytest.mark.parametrize("name", ["lookup", "lookup-tree", "suffix", "suffix-tree", "retrieval", "lookahead", "hybrid"])
def test_a_row_drafts_in_a_batch_as_it_does_alone(name: str, tiny: Target, store: Datastore) -> None:
    together = Engine(tiny, Watched(PROPOSERS[name](store))).generate(PROMPTS, sampling(0.0), NEW)
    for row, prompt in enumerate(PROMPTS):
        alone = Engine(tiny, Watched(PROPOSERS[name](store))).generate([prompt], SamplingParams(), NEW)
        assert alone.rounds[0] == together.rounds[row]


@pytest.fixture(scope="module")
def repetitive(embedded: Target) -> tuple[list[int], list[int]]:
    """A prompt, and how the trained target goes on: it repeats one line."""
    assert embedded.tokenizer is not None
    prompt = embedded.tokenizer.encode(CODE, add_special_tokens=False)
    return prompt, Engine(embedded).generate([prompt], SamplingParams(), 20).tokens[0]


@pytest.mark.parametrize("name", PROPOSERS)
def test_repetitive_text_is_really_accelerated(name: str, embedded: Target, repetitive: tuple[list[int], list[int]], tmp_path: Path) -> None:
    prompt, answer = repetitive
    proposer = PROPOSERS[name](build_datastore([prompt], tmp_path / "store", "a-tokenizer"))
    out = Engine(embedded, Watched(proposer)).generate([prompt], SamplingParams(), 20)
    assert out.tokens == [answer]
    assert accepted_of(out) >= len(out.rounds[0])  # at least one draft token a round


# Driving a proposer by hand


def observed(tokens: Sequence[Sequence[int]], following: Sequence[Sequence[int]], counts: Sequence[int]) -> Accepted:
    return Accepted(torch.tensor(tokens), torch.tensor(following), None, torch.zeros(len(counts), dtype=torch.int64), torch.tensor(counts))


def feed(proposer: Proposer, rows: Sequence[Sequence[int]]) -> None:
    """As after a prefill: each row's last token is the root, the rest the prompt."""
    proposer.reset(len(rows), 64)
    width = max(len(row) for row in rows) - 1
    padded = [[*row, *[VOCAB - 1] * (width + 1 - len(row))] for row in rows]
    proposer.observe(observed([row[:-1] for row in padded], [row[1:] for row in padded], [len(row) - 1 for row in rows]))


def drafts(proposer: Proposer, rows: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """The paths proposed for each row, root left out, in node order."""
    tree = proposer.propose(torch.tensor([row[-1] for row in rows]), GREEDY, None)
    tree.check_integrity()
    assert tree.num_nodes <= proposer.num_nodes and tree.valid_BN is not None
    out = []
    for tokens, parents, valid in zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), tree.valid_BN.tolist(), strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tokens)):
            paths.append((*paths[parents[node]], tokens[node]))
        out.append([path for path, real in zip(paths, valid, strict=True) if real and path])
    return out


FRESH = [[3, 1, 4, 15, 9, 2, 6], [20, 21, 22]]  # no token comes twice


@pytest.mark.parametrize("name", [name for name in PROPOSERS if name not in ("retrieval", "hybrid", "hybrid-nested")])
def test_a_row_without_a_match_proposes_its_root_only(name: str, store: Datastore) -> None:
    proposer = PROPOSERS[name](store)
    feed(proposer, FRESH)
    assert drafts(proposer, FRESH) == [[], []]
    if name not in ("recycling",):  # what the host knows to be empty is not verified
        assert proposer.propose(torch.tensor([6, 22]), GREEDY, None).num_nodes == 1
    rows = [FRESH[0], [8, 9, 8, 9, 8, 9]]
    feed(proposer, rows)
    first, second = drafts(proposer, rows)
    assert not first and (second or name == "recycling")


@pytest.mark.parametrize("name", [name for name in PROPOSERS if not name.startswith("hybrid")])
def test_tokens_leave_the_device_once(name: str, store: Datastore, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one transfer an observation, and none to propose."""
    calls: list[str] = []
    for method in ("tolist", "item", "__int__", "__bool__", "__index__", "cpu", "numpy"):
        original = getattr(Tensor, method)

        def counted(self: Tensor, *args: Any, original: Callable[..., Any] = original, method: str = method, **options: Any) -> Any:
            calls.append(method)
            return original(self, *args, **options)

        monkeypatch.setattr(Tensor, method, counted)
    proposer = PROPOSERS[name](store)
    calls.clear()
    feed(proposer, [[8, 9, 8, 9, 8, 9], [1, 2, 3]])
    assert len(calls) == (name != "recycling")
    calls.clear()
    tree = proposer.propose(torch.tensor([9, 3]), GREEDY, None)
    assert not calls
    if hasattr(proposer, "observe_logits"):
        proposer.observe_logits(tree.tokens_BN, torch.rand(2, tree.num_nodes, VOCAB), tree.valid_BN)
        assert len(calls) == (name != "recycling")


def test_a_finished_row_stands_still() -> None:
    proposer = PromptLookup(3)
    rows = [[8, 9, 8, 9], [1, 2, 1, 2]]
    feed(proposer, rows)
    proposer.observe(observed([[9, 5, 5], [2, 1, 2]], [[7, 7, 7], [1, 2, 1]], [0, 3]))
    assert drafts(proposer, [[9], [1]]) == [[(8,), (8, 9), (8, 9, 8)], [(2,), (2, 1), (2, 1, 2)]]


def test_impossible_sizes_are_refused(store: Datastore) -> None:
    for build, message in (
        (lambda: PromptLookup(0), "decode.depth: wanted at least 1, got 0"),
        (lambda: PromptLookup(4, max_ngram=2, min_ngram=3), "decode.min_ngram: wanted 1 .. 2, got 3"),
        (lambda: PromptLookup(4, nodes=9), "wanted depth 4 for the chain of a single match, got 9"),
        (lambda: SuffixAutomaton(4, 3), "decode.nodes: wanted 4 .. 128, got 3"),
        (lambda: SuffixAutomaton(4, factor=float("nan")), "decode.factor: wanted at least 0, got nan"),
        (lambda: Retrieval(store, max_ngram=17), "decode.max_ngram: wanted 1 .. 16, got 17"),
        (lambda: TokenRecycling.sized(depth=1, nodes=9, topk=8), "wanted 1 .. 8 nodes for 1 depths, got 9"),
        (lambda: Lookahead(1), "decode.ngram: wanted at least 2, got 1"),
        (lambda: Hybrid(PromptLookup(4), PromptLookup(4), 9), "decode.nodes: wanted 1 .. 8, got 9"),
    ):
        with pytest.raises(UserError, match=message):
            build()


# Shared parts


@given(texts, st.integers(0, 40), st.integers(1, 12))
def test_a_continuation_runs_on_as_a_loop(text: list[int], start: int, length: int) -> None:
    got = continuation(text, start, length)
    if start >= len(text):
        assert not got
    else:
        loop = text[start:]
        assert got == [loop[i % len(loop)] for i in range(length)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8), st.integers(1, 20))
def test_the_trie_keeps_the_most_frequent_prefixes(paths: list[list[int]], nodes: int) -> None:
    trie = Trie()
    for path in paths:
        trie.add(path)
    counts: dict[tuple[int, ...], int] = {}
    for path in paths:
        for size in range(1, len(path) + 1):
            counts[tuple(path[:size])] = counts.get(tuple(path[:size]), 0) + 1
    spelled: list[tuple[int, ...]] = [()]
    for token, parent in trie.best(nodes):
        assert parent < len(spelled)
        spelled.append((*spelled[parent], token))
    assert len(set(spelled)) == len(spelled) == 1 + min(nodes, len(counts))
    assert [counts[path] for path in spelled[1:]] == sorted(counts.values(), reverse=True)[:nodes]
    heaviest = tuple(trie.heaviest_path())
    for size in range(len(heaviest)):
        assert counts[heaviest[: size + 1]] == max(count for path, count in counts.items() if path[:-1] == heaviest[:size])


# Prompt lookup


def naive_lookup(text: list[int], depth: int, most: int, least: int, matches: int) -> list[list[int]]:
    """The definition: scan backwards for the longest suffix n-gram."""
    for size in range(most, least - 1, -1):
        ends = [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            return [continuation(text, end, depth) for end in ends[:matches]]
    return []


@settings(max_examples=150)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 3))
def test_prompt_lookup_equals_a_naive_scan(prompt: list[int], emitted: list[int], matches: int) -> None:
    proposer = PromptLookup(4, 3, 2, matches=matches)
    feed(proposer, [prompt])
    text = prompt + emitted
    proposer.observe(observed([text[len(prompt) - 1 : -1]], [emitted], [len(emitted)]))
    want = {tuple(path[:size]) for path in naive_lookup(text, 4, 3, 2, matches) for size in range(1, 5)}
    (got,) = drafts(proposer, [text])
    assert set(got) == want and len(got) == len(want)


# Suffix automaton


@settings(max_examples=200)
@given(texts)
def test_the_automaton_equals_a_search_for_the_longest_suffix(text: list[int]) -> None:
    automaton = Automaton()
    for count, token in enumerate(text, 1):
        automaton.append(token)
        known = text[:count]

        def ends(size: int, known: list[int] = known) -> list[int]:
            return [end for end in range(size, len(known)) if known[end - size : end] == known[len(known) - size :]]

        longest = max((size for size in range(1, count) if ends(size)), default=0)
        assert automaton.match == longest
        assert sorted(automaton.occurrences(99)) == (ends(longest) if longest else [])
        assert len(automaton.occurrences(2)) == min(2, len(ends(longest))) * (longest > 0)
    assert len(automaton._link) <= max(2, 2 * len(text))  # the bound that makes appending amortised constant time


def test_the_suffix_tree_counts_continuations() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2]  # after 1 2: 7 twice, 8 once; the longest suffix that came before is 7 1 2
    feed(chain := SuffixAutomaton(3), [text])
    assert drafts(chain, [text]) == [[(8,), (8, 1), (8, 1, 2)]]
    text = [1, 2, 7, 5, 1, 2, 8, 6, 1, 2, 7, 4, 1, 2]  # here it is 1 2
    feed(tree := SuffixAutomaton(2, 3), [text])
    assert drafts(tree, [text])[0][0] == (7,) and len(drafts(tree, [text])[0]) == 3
    feed(chain := SuffixAutomaton(2), [text])
    assert drafts(chain, [text])[0][0] == (7,)
    feed(tree := SuffixAutomaton(4, 12, factor=0.5), [text])
    assert drafts(tree, [text]) == [[(7,), (8,)]]  # two tokens matched: one level
    feed(tree := SuffixAutomaton(4, min_match=3), [text])
    assert drafts(tree, [text]) == [[]]


# Datastore and retrieval


documents = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=6).filter(any)


def brute_ends(store: list[list[int]], pattern: list[int]) -> list[list[int]]:
    """What follows each occurrence of a pattern, to the end of its document."""
    size = len(pattern)
    return [d[at + size :] for d in store for at in range(len(d) - size + 1) if d[at : at + size] == pattern]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    counter = iter(range(10**9))
    base = tmp_path_factory.mktemp("stores")
    return (base / str(next(counter)) for _ in iter(int, 1))


@settings(max_examples=100)
@given(docs=documents, context=st.integers(1, 9), text=st.lists(st.integers(0, 2), min_size=2, max_size=12))
def test_retrieval_equals_a_brute_force_search(folders: Iterator[Path], docs: list[list[int]], context: int, text: list[int]) -> None:
    store = build_datastore(docs, next(folders), "a-tokenizer", context=context)
    size, found = store.longest_suffix(text, 1, context)
    want = max((n for n in range(1, min(context, len(text)) + 1) if brute_ends(docs, text[-n:])), default=0)
    assert size == want
    if want:
        following = brute_ends(docs, text[-want:])
        assert sorted(store.continuations(found, size, 4, 99)) == sorted(rest[:4] for rest in following)
        some = store.continuations(found, size, 4, 3)
        assert len(some) == min(3, len(following))
        feed(proposer := Retrieval(store, 3, 60, min_ngram=1), [text])
        assert set(drafts(proposer, [text])[0]) == {tuple(rest[:n]) for rest in following for n in range(1, min(3, len(rest)) + 1)}


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=40), st.integers(1, 9))
def test_suffixes_are_sorted_by_their_first_tokens(tokens: list[int], context: int) -> None:
    order = sort_suffixes(np.array(tokens, dtype=np.int32), context)
    assert sorted(order.tolist()) == list(range(len(tokens)))
    heads = [tokens[start : start + context] for start in order]
    assert heads == sorted(heads)


def test_documents_are_not_joined(tmp_path: Path) -> None:
    store = build_datastore([[1, 2], [3, 4], []], tmp_path / "store", "a-tokenizer")
    assert store.documents == 2 and (store.tokens == [1, 2, SEPARATOR, 3, 4, SEPARATOR]).all()
    assert store.longest_suffix([2, 3], 1, 2)[0] == 1 and not store.occurrences([2, 3])
    size, found = store.longest_suffix([1], 1, 1)
    assert store.continuations(found, size, 9, 9) == [[2]]


def test_frequent_continuations_come_first(tmp_path: Path) -> None:
    store = build_datastore([[1, 2, 5], [1, 2, 6, 7], [1, 2, 6, 8], [1, 2, 6, 7]], tmp_path / "store", "a-tokenizer")
    feed(proposer := Retrieval(store, 2, 3), [[9, 1, 2]])
    assert drafts(proposer, [[9, 1, 2]]) == [[(6,), (6, 7), (5,)]]
    feed(proposer, [[9, 2]])  # one token is fewer than min_ngram
    assert drafts(proposer, [[9, 2]]) == [[]]


def test_a_datastore_survives_the_disk_and_is_mapped(tmp_path: Path) -> None:
    build_datastore([[1, 2, 3], [2, 3, 4]], tmp_path / "store", "a-tokenizer", context=4)
    store = load_datastore(tmp_path / "store", "a-tokenizer")
    for array in (store.tokens, store.suffixes):
        assert isinstance(array.base, np.memmap) and not array.flags.writeable
    assert (store.fingerprint, store.context, store.documents, len(store.occurrences([2, 3]))) == ("a-tokenizer", 4, 2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]  # nothing temporary is left


def damage_cut(folder: Path) -> None:
    file = folder / "suffixes.npy"
    file.write_bytes(file.read_bytes()[:-4])


def damage_flip(folder: Path) -> None:
    file = folder / "tokens.npy"
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x40
    file.write_bytes(bytes(data))


def damage_header(folder: Path) -> None:
    (folder / "tokens.npy").write_bytes(b"not an array")


def damage_type(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.zeros(8))


def damage_missing(folder: Path) -> None:
    (folder / "tokens.npy").unlink()


def damage_json(folder: Path) -> None:
    (folder / "datastore.json").write_text("{")


def damage_key(folder: Path) -> None:
    (folder / "datastore.json").write_text("{}")


def damage_version(folder: Path) -> None:
    about = json.loads((folder / "datastore.json").read_text())
    (folder / "datastore.json").write_text(json.dumps(about | {"version": 99}))


DAMAGES = [damage_cut, damage_flip, damage_header, damage_type, damage_missing, damage_json, damage_key, damage_version]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_datastore_is_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "store"
    build_datastore([[1, 2, 3], [2, 3, 4]], folder, "a-tokenizer")
    damage(folder)
    with pytest.raises(UserError, match=r"wanted an intact one, got .*; build it again") as raised:
        load_datastore(folder)
    assert "\n" not in str(raised.value)


def test_foreign_and_impossible_datastores_are_refused(tmp_path: Path) -> None:
    build_datastore([[1, 2]], tmp_path / "store", "a-tokenizer")
    with pytest.raises(UserError, match="wanted the target's tokenizer other, got a-tokenizer"):
        load_datastore(tmp_path / "store", "other")
    with pytest.raises(UserError, match="wanted a new folder"):
        build_datastore([[1, 2]], tmp_path / "store", "a-tokenizer")
    with pytest.raises(UserError, match=r"got none with datastore\.json; build it first"):
        load_datastore(tmp_path / "elsewhere")
    for docs, message in (([[]], "at least one token"), ([[1, -1]], "got -1"), ([[2**31]], "got 2147483648")):
        with pytest.raises(UserError, match=message):
            build_datastore(docs, tmp_path / "bad", "a-tokenizer")
    assert not (tmp_path / "bad").exists()


# Token recycling


def logits_with(best: Sequence[Sequence[int]]) -> Tensor:
    """[1, N, V] logits whose greatest entries are these tokens, in order."""
    logits = torch.zeros(1, len(best), VOCAB)
    for node, tokens in enumerate(best):
        for rank, token in enumerate(tokens):
            logits[0, node, token] = 10 - rank
    return logits


def test_recycling_fills_the_tree_from_the_last_candidates() -> None:
    proposer = TokenRecycling([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    proposer.reset(1, 64)
    assert drafts(proposer, [[5]]) == [[]]
    everything = torch.tensor([[True, True, True]])
    proposer.observe_logits(torch.tensor([[5, 6, 5]]), logits_with([[1, 2], [8, 9], [6, 7]]), everything)
    assert drafts(proposer, [[5]]) == [[(6,), (7,), (6, 8), (6, 9)]]  # the later 5 counts; nothing is known after 7
    proposer.observe_logits(torch.tensor([[7, 6, 7]]), logits_with([[3, 4], [1, 1], [9, 9]]), torch.tensor([[True, False, False]]))
    assert drafts(proposer, [[5]]) == [[(6,), (7,), (6, 8), (6, 9), (7, 3)]]  # invalid nodes teach nothing
    proposer.reset(1, 64)
    assert drafts(proposer, [[5]]) == [[]]


def test_recycling_may_keep_what_it_learned() -> None:
    proposer = TokenRecycling.sized(depth=2, nodes=3, topk=2, keep_matrix=True)
    proposer.reset(1, 64)
    proposer.observe_logits(torch.tensor([[5]]), logits_with([[6, 7]]), torch.tensor([[True]]))
    proposer.reset(2, 64)
    assert drafts(proposer, [[5], [6]]) == [[(6,), (7,)], []]


# Lookahead


def test_lookahead_drafts_ngrams_of_the_text_and_of_rejected_branches() -> None:
    proposer = Lookahead(3, 2)
    row = [4, 1, 2, 3, 1]
    feed(proposer, [row])
    assert drafts(proposer, [row]) == [[(2,), (2, 3)]]
    tree = proposer.propose(torch.tensor([1]), GREEDY, None)
    # The target chose 8 after the root: 2 and 3 are rejected, but what it would choose after them is kept: 1 2 -> 6, 2 3 -> 7.
    assert tree.valid_BN is not None
    proposer.observe_logits(tree.tokens_BN, logits_with([[8], [6], [7]]), tree.valid_BN)
    proposer.observe(observed([[1]], [[8]], [1]))
    assert drafts(proposer, [[8]]) == [[]]
    proposer.observe(observed([[8]], [[2]], [1]))
    assert set(drafts(proposer, [[2]])[0]) == {(3,), (3, 1), (3, 7)}
    proposer.observe(observed([[2]], [[1]], [1]))
    assert drafts(proposer, [[1]])[0] == [(8,), (2,), (8, 2), (2, 6)]  # the two newest of three candidates, 2 3 was the oldest


def test_lookahead_can_leave_the_prompt_out() -> None:
    proposer = Lookahead(3, 2, from_prompt=False)
    feed(proposer, [[1, 2, 3, 1]])
    assert drafts(proposer, [[1]]) == [[]]
    proposer.observe(observed([[1, 2]], [[2, 1]], [2]))
    assert drafts(proposer, [[1]]) == [[(2,), (2, 1)]]


# Hybrid


def test_a_hybrid_gives_each_its_own_taps(tiny: Target) -> None:
    first, second, third = Tapped((0, 2)), Tapped((1, 2)), PromptLookup(3)
    hybrid = Hybrid(Hybrid(first, third), second)
    assert hybrid.taps == (0, 1, 2)
    Engine(tiny, hybrid).generate(PROMPTS[:1], SamplingParams(), 4)
    alone = Tapped((0, 1, 2))
    Engine(tiny, alone).generate(PROMPTS[:1], SamplingParams(), 4)
    whole, hidden = alone.seen[0], tiny.hidden_size
    assert whole is not None
    embedding, one, two = (whole[..., part * hidden : (part + 1) * hidden] for part in range(3))
    for proposer, want in ((first, (embedding, two)), (second, (one, two))):
        assert proposer.seen[0] is not None
        torch.testing.assert_close(proposer.seen[0], torch.cat(want, dim=-1), rtol=0, atol=0)


def test_a_hybrid_keeps_the_first_one_first() -> None:
    rows = [[1, 2, 3, 4, 1, 2], FRESH[0]]
    hybrid = Hybrid(PromptLookup(2, 3, 3), PromptLookup(3, 2, 1), 3)
    feed(hybrid, rows)
    assert drafts(hybrid, rows) == [[(3,), (3, 4), (3, 4, 1)], []]  # the first finds no match of three: all room is the second's
    hybrid = Hybrid(PromptLookup(2), Tapped(()), 2)
    feed(hybrid, rows)
    assert drafts(hybrid, rows) == [[(3,), (3, 4)], [(0,)]]
    hybrid = Hybrid(Tapped(()), PromptLookup(2), 2)
    feed(hybrid, rows)
    assert drafts(hybrid, rows) == [[(0,), (3,)], [(0,)]]


def test_a_hybrid_passes_logits_on_with_the_merged_tree() -> None:
    hybrid = Hybrid(PromptLookup(2), Hybrid(Lookahead(3, 2), TokenRecycling.sized(depth=1, nodes=2, topk=2)))
    assert hybrid.wants_logits and not Hybrid(PromptLookup(2), PromptLookup(2)).wants_logits
    feed(hybrid, [[4, 1, 2, 3, 1]])
    tree = hybrid.propose(torch.tensor([1]), GREEDY, None)
    assert tree.valid_BN is not None
    hybrid.observe_logits(tree.tokens_BN, logits_with([[8, 9], [6], *[[0]] * (tree.num_nodes - 2)]), tree.valid_BN)
    paths = drafts(hybrid, [[1]])[0]
    assert {(2, 6), (8,), (9,)} <= set(paths)  # the pool learned 1 2 -> 6 from a node that prompt lookup drafted, the matrix 1 -> 8, 9
