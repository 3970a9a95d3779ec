"""A draft with another tokenizer: which tokens are shared, how texts are read, and that drafting changes nothing and is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.free.hybrid import Hybrid
from draftsmith.decode.proposer import Accepted
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.cross_tokenizer import WINDOW, CrossTokenizer, CrossTokenizerProposer, Reader, Vocabulary, intersection
from draftsmith.heads.registry import Pair, open_drafter
from draftsmith.heads.standalone import Standalone
from draftsmith.recipes.schema import TargetRef
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..decode.sizes import SIZES

CODE = Path(json.__file__).with_name("decoder.py").read_text()
PROSE = Path(__file__).read_text() + "Grüße aus Köln: 三つの鍵, naïve café, \N{GRINNING FACE}.\n"
TEXT = "def read(self, data):\n    return json.loads(data)  # Grüße \N{GRINNING FACE}\n" + CODE[2000:3000]


def byte_level(text: str, size: int, *, eos: str = "</s>", begins: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's, trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    named: dict[str, Any] = {"special_tokens": [eos, "<s>", "<|user|>"], "initial_alphabet": alphabet}
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, show_progress=False, **named))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token="<s>")


def sentencepiece(text: str, size: int) -> PreTrainedTokenizerFast:
    """Metaspace BPE with raw bytes for what it lacks, as Llama 2's. It puts a blank before a text, and <s> before that."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, special_tokens=special, limit_alphabet=60, show_progress=False))
    # The raw bytes are ordinary tokens of the vocabulary, not special ones.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "code": lambda: byte_level(CODE, 700),
    "prose": lambda: byte_level(PROSE, 500, eos="<|end|>", begins=True),
    "bytes": lambda: byte_level("", 300),
    "pieces": lambda: sentencepiece(PROSE, 600),
}
PAIRS = [("code", "prose"), ("prose", "code"), ("pieces", "code"), ("code", "pieces"), ("bytes", "code")]
_made: dict[str, PreTrainedTokenizerFast] = {}


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name not in _made:
        _made[name] = MAKERS[name]()
    return _made[name]


def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.of(tokenizer(name), name, len(tokenizer(name)))


def reader(draft: str, target: str) -> Reader:
    ours, theirs = vocabulary(draft), vocabulary(target)
    return Reader(tokenizer(draft), ours, theirs, intersection(ours, theirs))


def spelled(name: str, index: int) -> str:
    """What the tokenizer itself says that a token adds to a text; U+FFFD for incomplete characters."""
    made = tokenizer(name)
    first = made("a", add_special_tokens=False)["input_ids"][-1:]
    return str(made.decode([*first, index]))[len(made.decode(first)) :]


def tiny(made: PreTrainedTokenizerFast, seed: int = 0, **sizes: int) -> Target:
    """A random model of this tokenizer, in float64."""
    torch.manual_seed(seed)
    shape = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": len(made), "eos_token_id": made.eos_token_id, **sizes}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model.double(), made, "tiny")


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_shared_tokens_are_those_that_both_tokenizers_spell_alike(draft: str, target: str) -> None:
    """By their own decoders; one to one. Special tokens only with special tokens."""
    ours, theirs = vocabulary(draft), vocabulary(target)
    shared = intersection(ours, theirs)
    assert len(set(shared.values())) == len(shared) and len(shared) >= 256
    spelling = {name: {index: spelled(name, index) for index in vocabulary(name).text} for name in (draft, target)}
    for mine, yours in shared.items():
        if mine in ours.special or yours in theirs.special:
            assert ours.special[mine] == theirs.special[yours]
        else:
            assert spelling[draft][mine] == spelling[target][yours]
    assert {ours.special[mine] for mine in shared if mine in ours.special} == {*ours.special.values()} & {*theirs.special.values()}
    complete = [{text for text in spelling[name].values() if text and "\N{REPLACEMENT CHARACTER}" not in text} for name in (draft, target)]
    assert complete[0] & complete[1] <= {spelling[draft][mine] for mine in shared if mine in ours.text}
    assert len(shared) < len(tokenizer(target))


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_the_end_is_read_as_it_is_in_the_whole_text(draft: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token and several at a time, through characters of several tokens; once the text is long, without reading all of it."""
    ids = tokenizer(target)(TEXT, add_special_tokens=False)["input_ids"]
    made = reader(draft, target)
    whole, read_whole = Reader.read, []

    def counting(reader: Reader, ids: list[int]) -> list[int]:
        read_whole.append(len(ids))
        return whole(reader, ids)

    monkeypatch.setattr(Reader, "read", counting)
    for steps in ([1], [3, 1, 5, 2, 7]):
        at, read, rounds = 1, whole(made, ids[:1]), 0
        read_whole.clear()
        while at < len(ids):
            new = min(steps[at % len(steps)], len(ids) - at)
            at, rounds = at + new, rounds + 1
            read = made.read_on(read, ids[:at], new)
            assert read == whole(made, ids[:at])
        assert sum(count > WINDOW + max(steps) for count in read_whole) <= 0.02 * rounds
    text = tokenizer(draft).decode(read, skip_special_tokens=True)
    assert text.removeprefix(" ") == TEXT
    assert read == tokenizer(draft)(TEXT)["input_ids"]  # begins as the draft's own texts do


def test_special_tokens_are_read_as_the_drafts() -> None:
    """By name, or by what they are for; those that the draft lacks as text; a beginning that it lacks not at all."""
    ours, theirs = vocabulary("prose"), vocabulary("code")
    user, begin = (tokenizer("code").convert_tokens_to_ids(name) for name in ("<|user|>", "<s>"))
    eos = tokenizer("prose").eos_token_id, tokenizer("code").eos_token_id
    shared = intersection(ours, theirs, ([eos[0]], [eos[1]]))
    assert eos[0] not in intersection(ours, theirs) and shared[eos[0]] == eos[1]
    word = tokenizer("code")("x", add_special_tokens=False)["input_ids"]
    read = Reader(tokenizer("prose"), ours, theirs, shared).read([begin, user, *word, eos[1]])
    assert read == [*(tokenizer("prose").convert_tokens_to_ids(name) for name in ("<s>", "<|user|>", "x")), eos[0]]
    made = reader("pieces", "prose")  # has no <|user|>
    user, begin = (tokenizer("prose").convert_tokens_to_ids(name) for name in ("<|user|>", "<s>"))
    assert tokenizer("pieces").decode(made.read([begin, user]), skip_special_tokens=True).strip() == "<|user|>"
    missing = Vocabulary({0: b"a"}, {1: "<begin>"}, 1, False)
    assert Reader(tokenizer("code"), theirs, missing, {}).read([1, 0]) == tokenizer("code")("a")["input_ids"]
    assert len(Reader(tokenizer("code"), theirs, missing, {}).read([1])) == 1  # nothing to read, but the draft needs a token


@pytest.mark.parametrize(("draft", "target"), [("prose", "code"), ("pieces", "code"), ("bytes", "code")])
def test_the_cache_holds_what_was_read(draft: str, target: str) -> None:
    """Rows of several lengths whose texts grow by different counts: the draft's state is that of a pass over the whole text without a cache."""
    ours, theirs = tiny(tokenizer(draft), 1), tiny(tokenizer(target))
    proposer = CrossTokenizer(ours, theirs).proposer(depth=3)
    ids = tokenizer(target)(TEXT[:400], add_special_tokens=False)["input_ids"]
    at = [40, 3, 17]
    proposer.reset(3, 61)  # the target's tokens of the longest row
    grown = [at, *[[4, 1, 5], [1, 0, 2], [0, 6, 3], [2, 1, 1], [5, 5, 5], [3, 2, 4], [1, 1, 1]]]
    before, cut = [0, 0, 0], False
    for counts in grown:
        width = max(counts)
        tokens, following = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
        for row, count in enumerate(counts):
            tokens[row, :count] = torch.tensor(ids[before[row] : before[row] + count], dtype=torch.int64)
            following[row, :count] = torch.tensor(ids[before[row] + 1 : before[row] + 1 + count], dtype=torch.int64)
        old = [list(read) for read in proposer._read]
        with torch.no_grad():
            proposer.observe(Accepted(tokens, following, None, torch.tensor(before), torch.tensor(counts)))
        before = [start + count for start, count in zip(before, counts, strict=True)]
        cut |= any(new[: len(read)] != read for read, new in zip(old, proposer._read, strict=True))
        for row, end in enumerate(before):
            read = reader(draft, target).read(ids[: end + 1])
            assert proposer._read[row] == read and int(proposer._length_B[row]) == len(read)
            with torch.no_grad():
                want = ours.decoder(input_ids=torch.tensor([read]), use_cache=False).last_hidden_state[0, -1]
            assert torch.allclose(proposer._hidden_BH[row], want, rtol=0, atol=1e-9)
    assert cut or draft == "bytes"  # the cache was really cut back
    assert draft != "bytes" or proposer._capacity > 61  # and had to grow


def renamed(share: float) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """(the built-in target's tokenizer with its ids permuted, which id became which). A share of the tokens is not in it under its name: their
    merges are left out, so that texts are made of shorter ones. Special tokens have other names."""
    state = json.loads((Path(TargetRef().location) / "tokenizer.json").read_text())
    vocab: dict[str, int] = state["model"]["vocab"]
    generator = torch.Generator().manual_seed(0)
    new_N = torch.randperm(len(vocab), generator=generator)
    special = {token["content"] for token in state["added_tokens"]}
    merged = [token for token in vocab if token not in special and len(token) > 1]
    lost = {merged[int(i)] for i in torch.randperm(len(merged), generator=generator)[: round(share * len(merged))]}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if not lost & {*pair, "".join(pair)}]
    other = {"<|end|>": "</s>", "<|user|>": "<|human|>"}
    state["model"]["vocab"] = {other.get(t, f"no{index}" if t in lost else t): int(new_N[index]) for t, index in vocab.items()}
    for token in state["added_tokens"]:
        token["id"], token["content"] = int(new_N[token["id"]]), other.get(token["content"], token["content"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="</s>", pad_token="<|pad|>"), new_N


@pytest.fixture(scope="module")
def embedded() -> Target:
    location = TargetRef().location
    return Target(AutoModelForCausalLM.from_pretrained(location, dtype=torch.float64), AutoTokenizer.from_pretrained(location), "embedded")


def disguised(share: float) -> Target:
    """The built-in target with another tokenizer."""
    made, new_N = renamed(share)
    model = AutoModelForCausalLM.from_pretrained(TargetRef().location, dtype=torch.float64)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[new_N] = weight.clone()
    model.config.eos_token_id = model.generation_config.eos_token_id = made.eos_token_id
    return Target(model, made, "disguised")


PROMPTS = [
    "import os\n\n\ndef main(",
    "x",
    "class Reader:\n    def read(self, \N{GRINNING FACE}",
    "for i in range(10):\n    print(i)\nfor i in range(20):",
]
NEW = 16


@pytest.mark.parametrize("settings", [{"depth": 3}, {"tree": "dynamic", "depth": 3, "topk": 3, "nodes": 8}], ids=["chain", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_tokenizer_changes_no_token(embedded: Target, temperature: float, settings: dict[str, Any]) -> None:
    """With a draft that is good, so that much is accepted, and some is not. Rows of a ragged batch draft what they draft alone."""
    proposer = CrossTokenizer(disguised(0.03), embedded).proposer(**settings)
    made = embedded.tokenizer
    assert made is not None
    prompts = [made(text)["input_ids"] for text in PROMPTS]
    params = [SamplingParams(temperature=temperature, seed=row) for row in range(len(prompts))]
    out = Engine(embedded, proposer).generate(prompts, params, NEW, eos_ids=[made.eos_token_id])
    assert out.tokens == Engine(embedded).generate(prompts, params, NEW, eos_ids=[made.eos_token_id]).tokens
    accepted = [r.accepted for rounds in out.rounds for r in rounds]
    assert 0.4 < sum(accepted) / (3 * len(accepted)) < 1
    alone = Engine(embedded, proposer).generate([prompts[2]], params[2], NEW, eos_ids=[made.eos_token_id])
    assert alone.rounds[0] == out.rounds[2]


@pytest.mark.parametrize(("draft", "target"), [("prose", "code"), ("pieces", "code"), ("code", "pieces"), ("bytes", "code")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_models_change_no_token(draft: str, target: str, temperature: float) -> None:
    """Their texts are no texts at all: incomplete characters, special tokens, tokens in orders that no tokenizer makes."""
    ours, theirs = tiny(tokenizer(draft), 1), tiny(tokenizer(target), vocab_size=len(tokenizer(target)) + 5)  # padding rows
    prompts = [tokenizer(target)(text)["input_ids"] for text in PROMPTS]
    params = [SamplingParams(temperature=temperature, seed=row) for row in range(len(prompts))]
    out = Engine(theirs, CrossTokenizer(ours, theirs).proposer(depth=3)).generate(prompts, params, 24)
    assert out.tokens == Engine(theirs).generate(prompts, params, 24).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_good_draft_is_accepted_nearly_as_often_as_with_the_targets_tokenizer(embedded: Target, temperature: float) -> None:
    """The target drafts for itself, its ids permuted: all of its drafts would be accepted, were texts never cut otherwise than its tokenizer cuts
    them. At temperature 0 they are not, but sampled texts are at times."""
    draft = CrossTokenizer(disguised(0.0), embedded)
    made = embedded.tokenizer
    assert made is not None and len(draft.shared) == len(made) - 1  # <|user|> has another name; <|end|> too, but it is the end
    prompts = [made(text)["input_ids"] for text in PROMPTS]
    params = [SamplingParams(temperature=temperature, seed=row) for row in range(len(prompts))]
    rounds = [r for row in Engine(embedded, draft.proposer(depth=3)).generate(prompts, params, 32).rounds for r in row]
    accepted = sum(r.accepted for r in rounds) / sum(r.proposed for r in rounds)
    assert accepted >= (0.95 if temperature == 0 else 0.85)


def test_the_end_is_drafted(embedded: Target) -> None:
    """The draft's end is the target's, although it has another name."""
    draft = disguised(0.0)
    crossing = CrossTokenizer(draft, embedded)
    assert draft.tokenizer is not None and embedded.tokenizer is not None
    assert crossing.shared[draft.tokenizer.eos_token_id] == embedded.tokenizer.eos_token_id
    ids = embedded.tokenizer("<|user|>import os<|assistant|>")["input_ids"]
    assert embedded.tokenizer.eos_token_id not in ids
    read = crossing.reader.read([*ids, embedded.tokenizer.eos_token_id, *ids])
    assert read.count(draft.tokenizer.eos_token_id) == 1


def test_it_is_opened_by_name_if_that_is_asked_for(tmp_path: Path) -> None:
    """And a draft with the target's tokenizer is an ordinary draft model, whether it is asked for or not."""
    folders = {}
    for name in ("code", "prose"):
        folders[name] = tmp_path / name
        model = tiny(tokenizer(name)).model.config
        LlamaForCausalLM(model).save_pretrained(folders[name])
        tokenizer(name).save_pretrained(folders[name])
    target = Target.load(str(folders["code"]), dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"wanted the tokenizer of target .* tokens differ .* or allow another tokenizer \(--cross-tokenizer\)"):
        open_drafter(folders["prose"], target)
    drafter, contract = open_drafter(folders["prose"], target, cross_tokenizer=True)
    assert isinstance(drafter, CrossTokenizer) and contract["draft_model"]["shared_tokens"] == len(drafter.shared) > 256
    assert isinstance(open_drafter(folders["code"], target, cross_tokenizer=True)[0], Standalone)
    pair, _ = open_drafter(f"hybrid:suffix_automaton+{folders['prose']}", target, cross_tokenizer=True)
    assert isinstance(pair, Pair)
    proposer = pair.proposer(depth=3)
    assert isinstance(proposer, Hybrid) and isinstance(proposer.second, CrossTokenizerProposer)
    out = Engine(target, proposer).generate([[300, 301, 302, 300, 301]], SamplingParams(), 12)
    assert out.tokens == Engine(target).generate([[300, 301, 302, 300, 301]], SamplingParams(), 12).tokens
    with pytest.raises(UserError, match="tokens differ"):
        open_drafter(f"cascade:prompt_lookup+{folders['prose']}", target, cross_tokenizer=True)


def test_what_cannot_be_read_is_refused() -> None:
    code, prose = tiny(tokenizer("code")), tiny(tokenizer("prose"))
    with pytest.raises(UserError, match="wanted drafts that are not sampled, got kind iid"):
        CrossTokenizer(code, prose).proposer(kind="iid")
    few = tiny(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"\u0120qq": 0, "\u0120zz": 1}, [])), eos_token="zzz"), vocab_size=16)
    with pytest.raises(UserError, match=r"wanted at least 1% of the 700 tokens of target tiny, got 1 that both have"):
        CrossTokenizer(few, code)
    words = tiny(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_token="b"), vocab_size=16)
    with pytest.raises(UserError, match=r"wanted a byte-level or sentencepiece tokenizer, got tiny's, which marks no blanks"):
        CrossTokenizer(words, code)
    without = Target(code.model, None, "bare")
    with pytest.raises(UserError, match="wanted models with tokenizers, got bare without one"):
        CrossTokenizer(without, prose)
