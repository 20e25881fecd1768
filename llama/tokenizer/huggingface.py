"""The tokenizer.json of a Hugging Face folder, run by the `tokenizers` library.

The library matches added tokens in every text, including control tokens. So the control tokens are removed before the
library reads the file; then no text can become one. Everything else follows the file.
File format: huggingface/tokenizers, tokenizers/src/tokenizer/serialization.rs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ..checks import boolean, is_integer
from ..errors import TokenizerError
from .base import Tokenizer
from .common import (
    CODE_LLAMA_CONTROL,
    NOTHING,
    PRE,
    Named,
    byte_level_bytes,
    byte_piece,
    check_length,
    check_no_byte_lost,
    library_errors,
    looks_control,
    missing_bytes,
    piece_bytes,
    stop_ids,
    written_by,
)
from .steps import check_steps, has, parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Tokens that begin and end a text if neither tokenizer_config.json nor tokenizer.json names them
BOS_NAMES = ("<|begin_of_text|>", "<s>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>")


def recognizes(start: bytes) -> bool:
    """Whether a file begins like a JSON object."""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def parse(data: bytes, where: str) -> dict[str, Any]:
    """The parsed file, an object that has a model. Raises TokenizerError."""
    try:
        source = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{where}: not valid JSON: {error}; the file is truncated or damaged, download it again"
        ) from None
    if not isinstance(source, dict) or not isinstance(source.get("model"), dict):
        raise TokenizerError(
            f"{where} is not a tokenizer.json: expected the key 'model';"
            " if it is a tokenizer_config.json or vocab.json, name the tokenizer.json next to it"
        )
    return source


def around_text(post_processor: Any) -> tuple[list[str], list[str]]:
    """The control strings that the file adds before and after a text."""
    for part in parts(post_processor):
        if part.get("type") in ("BertProcessing", "RobertaProcessing"):
            return [part["cls"][0]], [part["sep"][0]]
        if part.get("type") == "TemplateProcessing":
            names = [item["SpecialToken"]["id"] if "SpecialToken" in item else None for item in part["single"]]
            text = names.index(None)
            return [name for name in names[:text] if name], [name for name in names[text:] if name]
    return [], []


def vocabulary(source: Mapping[str, Any], where: str) -> dict[str, int]:
    """Token -> id, of the model and the added tokens. Raises TokenizerError on a contradiction."""
    listed = source["model"].get("vocab")
    if isinstance(listed, dict):
        entries = list(listed.items())
    elif isinstance(listed, list):  # Unigram: pieces with scores; the index is the id
        entries = [(piece, id) for id, (piece, _) in enumerate(listed)]
    else:
        raise TokenizerError(
            f"{where}: the model's vocab must be an object or a list, found {type(listed).__name__};"
            " download the file again"
        )
    entries += [(added["content"], added["id"]) for added in source.get("added_tokens") or []]
    ids: dict[str, int] = {}
    tokens: dict[int, str] = {}
    for token, id in entries:
        if not (isinstance(token, str) and is_integer(id) and id >= 0):
            raise TokenizerError(
                f"{where}: token {token!r} has the id {id!r}, expected a string and an integer of at least 0;"
                " download the file again"
            )
        check_length(token, id, where)
        if ids.setdefault(token, id) != id:
            raise TokenizerError(
                f"{where}: token {token!r} has two ids, {ids[token]} and {id}; download the file again"
            )
        if tokens.setdefault(id, token) != token:
            raise TokenizerError(
                f"{where}: id {id} has two tokens, {tokens[id]!r} and {token!r}; download the file again"
            )
    if not ids:
        raise TokenizerError(f"{where}: the vocabulary is empty; download the file again")
    return ids


def check_model(model: Mapping[str, Any], where: str) -> None:
    """Raise TokenizerError for a model that the LLaMA family does not use."""
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if model.get("type", "BPE") not in ("BPE", "Unigram") or affixes:
        raise TokenizerError(
            f"{where}: its model is {model.get('type')!r:.40}{' with ' * bool(affixes)}{' and '.join(affixes)};"
            f" expected BPE or Unigram without affixes, as in the LLaMA family; other models are not supported"
        )


def named(settings: Mapping[str, Any], key: str, ids: Mapping[str, int], where: str) -> str | None:
    """The token that tokenizer_config.json names under a key, as a string or as an object with a content."""
    token = named_token(settings.get(key))
    if token is None or (isinstance(token, str) and token in ids):
        return token
    raise TokenizerError(
        f"{where}: tokenizer_config.json names {token!r} as {key}, which is not in this vocabulary;"
        f" the two files don't belong together, download both again"
    )


def merges_without(removed: Set[str], model: Mapping[str, Any], ids: Mapping[str, int], where: str) -> Any:
    """The merges that neither use nor produce a removed token. Raises TokenizerError on a merge of unknown tokens."""
    remaining = []
    for i, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(token, str) for token in pair):
            raise TokenizerError(f"{where}: merge {i} is {merge!r}, expected two tokens; download the file again")
        left, right = pair
        union = left + right
        if left not in ids or right not in ids or union not in ids:
            raise TokenizerError(
                f"{where}: merge {i}, {left!r} + {right!r}, is not made of the vocabulary's tokens; download the file"
                " again"
            )
        if removed.isdisjoint((left, right, union)):
            remaining.append(pair)
    return remaining


def _hidden(token: str) -> str:
    # The model never sees a space: the earlier steps have written it as Ġ or U+2581.
    return f" {token}"


def without_control(
    source: Mapping[str, Any], ids: Mapping[str, int], control: Collection[str], unknown: str | None, where: str
) -> dict[str, Any]:
    """The file without its control tokens, for the library: it then neither matches nor adds any.

    The token for unknown characters remains, under a name that no text can contain. So do the control tokens of a
    Unigram model, where the index in the list is the id.
    """
    model = {**source["model"], "type": source["model"].get("type", "BPE")}
    if "dropout" in model:
        model["dropout"] = None  # skips random merges, for training only
    removed = {token for token in (*control, unknown) if token is not None}
    added = source.get("added_tokens") or []
    if isinstance(model["vocab"], dict):
        if model.get("merges"):
            model["merges"] = merges_without(removed, model, ids, where)
        # The library would choose ids of its own for added tokens that are not in the vocabulary.
        model["vocab"] = {token: id for token, id in ids.items() if token not in removed}
        added = [token for token in added if token["content"] not in removed]
        if unknown is None:
            model["unk_token"] = None
        elif unknown in ids:
            model["vocab"][_hidden(unknown)] = ids[unknown]
            model["unk_token"] = _hidden(unknown)
    else:
        name = {token: _hidden(token) for token in removed}
        model["vocab"] = [[name.get(piece, piece), score] for piece, score in model["vocab"]]
        added = [{**token, "content": name.get(token["content"], token["content"])} for token in added]
    unused = dict.fromkeys(("post_processor", "decoder", "padding", "truncation"))
    return {**source, "model": model, "added_tokens": added, **unused}


def special_by_settings(settings: Mapping[str, Any], ids: Mapping[str, int], where: str) -> set[str]:
    """The tokens that tokenizer_config.json marks as special. Raises TokenizerError if it contradicts `ids`."""
    found = set()
    listed = settings.get("added_tokens_decoder")
    for id, entry in listed.items() if isinstance(listed, Mapping) else ():
        token = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(token, str) or str(ids.get(token)) != id:
            raise TokenizerError(
                f"{where}: tokenizer_config.json lists {token!r:.60} with the id {id!r:.20}, unlike this vocabulary;"
                f" the two files don't belong together, download both again"
            )
        if entry.get("special"):
            found.add(token)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        named = settings.get(key) or []
        for value in named.values() if isinstance(named, Mapping) else named if isinstance(named, list) else []:
            token = named_token(value)
            if token not in ids:
                raise TokenizerError(
                    f"{where}: tokenizer_config.json names {token!r:.60} in {key}, which is not in this vocabulary;"
                    f" the two files don't belong together, download both again"
                )
            found.add(token)
    return found


def named_token(value: Any) -> Any:
    """The token in a value of tokenizer_config.json, which is a string or an object with the key content."""
    return value.get("content") if isinstance(value, Mapping) else value


def check_prefix(settings: Mapping[str, Any], source: Mapping[str, Any], where: str) -> None:
    """Raise TokenizerError if add_prefix_space contradicts the file, because transformers then changes its steps."""
    setting, kind = settings.get("add_prefix_space"), settings.get("tokenizer_class")
    if setting is None or kind in ("PreTrainedTokenizerFast", "TokenizersBackend"):  # these classes ignore the setting
        return
    boolean(f"{where}: add_prefix_space of tokenizer_config.json", setting, TokenizerError)
    adds = source != without_prefix(source)
    if adds != setting:
        raise TokenizerError(
            f"{where}: tokenizer_config.json sets add_prefix_space to {json.dumps(setting)}, but the normalizer"
            f" and pre_tokenizer of this file {'add a' if adds else 'add no'} space before a text; remove the"
            " setting, or correct the file"
        )


def adds_only_first(part: Mapping[str, Any]) -> bool:
    """Whether a step adds a space at the beginning of a text, but not after a control token."""
    return part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"


def without_prefix(source: Mapping[str, Any], only_first: bool = False) -> dict[str, Any]:
    """The file without the steps that add a space before a text; only_first: without those of `adds_only_first`."""
    steps = {name: copy.deepcopy(source.get(name)) for name in ("normalizer", "pre_tokenizer")}
    for part in [*parts(steps["normalizer"]), *parts(steps["pre_tokenizer"])]:
        if only_first and not adds_only_first(part):
            continue
        never = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
        part.update({key: value for key, value in never.items() if key in part})
    return {**source, **steps}


def strips_space(decoder: Any) -> bool:
    """Whether the decoder removes the space before every text."""
    for part in parts(decoder):
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True)
    return False


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json. Ids without a token have no text.

    settings  the parsed tokenizer_config.json, if there is one
    """

    def __init__(self, data: bytes, where: str, settings: Mapping[str, Any] | None = None, named_by: Named = NOTHING):
        self._where = where
        self.data, self.settings = data, settings or {}
        source = parse(data, where)
        with library_errors(where, "not a usable tokenizer.json"):
            self._build(source, self.settings, named_by)

    def _build(self, source: Mapping[str, Any], settings: Mapping[str, Any], named_by: Named) -> None:
        where, model, decoder = self._where, source["model"], source.get("decoder")
        check_steps(source, where)
        check_prefix(settings, source, where)
        ids = vocabulary(source, where)
        self.n_vocab = max(ids.values()) + 1
        self.token_of = {id: token for token, id in ids.items()}
        self.byte_level = has(decoder, "ByteLevel") or has(source.get("pre_tokenizer"), "ByteLevel")
        if not self.byte_level and not has(decoder, "Metaspace", "ByteFallback", "Replace"):
            types = ", ".join(str(part.get("type")) for part in parts(decoder)) or "none"
            raise TokenizerError(
                f"{where}: its decoder is {types}; supported are those of the LLaMA family: ByteLevel, or Metaspace,"
                f" ByteFallback and Replace of SentencePiece"
            )
        check_model(model, where)
        self._added = {added["content"]: bool(added.get("special")) for added in source.get("added_tokens") or []}
        control = {token for token, special in self._added.items() if special or looks_control(token)}
        control |= CODE_LLAMA_CONTROL & (self._added.keys() if self.byte_level else ids.keys())
        control |= special_by_settings(settings, ids, where)
        before, after = around_text(source.get("post_processor"))
        bos, eos = named(settings, "bos_token", ids, where), named(settings, "eos_token", ids, where)
        if bos is None:
            known = [] if "bos_token" in settings else [name for name in BOS_NAMES if name in control]
            bos = next(iter([*before, *known]), None)
        if eos is None and "eos_token" not in settings:
            eos = next((name for name in EOS_NAMES if name in control), None)
        self.add_bos = self._adds_bos(settings.get("add_bos_token"), before, bos)
        bos = bos or next((self.token_of[id] for id in named_by.bos_ids if id in self.token_of), None)
        stops = [id for id in named_by.stop_ids if id < self.n_vocab]  # an id beyond the vocabulary has no token
        marks = [*before, *after, bos, eos, *(self.token_of.get(id) for id in stops)]
        control |= {name for name in marks if name is not None}
        if not control <= ids.keys():
            absent = min(control - ids.keys())
            raise TokenizerError(
                f"{where}: the post-processor adds {absent!r}, which is not in the vocabulary; download the file again"
            )

        self.unknown: str | None = model.get("unk_token")
        if isinstance(model["vocab"], list) and model.get("unk_id") is not None:
            self.unknown = model["vocab"][model["unk_id"]][0]
        if self.unknown in marks or looks_control(self.unknown or ""):
            self.unknown = None  # GPT-2's files use the end of text for unknown characters
        template = named_by.template or settings.get("chat_template")
        self.visible = written_by(template if isinstance(template, str) else "", self._added.keys() - control)
        control = (control | self.visible) - {self.unknown}
        self.kind = f"{'byte-level' if self.byte_level else 'SentencePiece-style'} {model.get('type', 'BPE')}"
        self.control = {token: ids[token] for token in sorted(control, key=ids.__getitem__)}
        self.bos_id = None if bos is None else ids[bos]
        self.eos_id = min(stops, default=None) if eos is None else ids[eos]
        self.stop_ids = stop_ids(self.control, [self.eos_id, *stops])
        self.strips_leading_space = not self.byte_level and strips_space(decoder)
        self._byte_fallback = has(decoder, "ByteFallback")
        lossy = self.byte_level and self.unknown is None
        self._missing = missing_bytes(ids.keys() - control) if lossy else b""

        readable = without_control(source, ids, control, self.unknown, where)
        self._backend = self._load(readable)
        self._joining = self._load(without_prefix(readable)) if PRE in self.control else self._backend
        first = any(map(adds_only_first, parts(source.get("pre_tokenizer"))))
        self._continuing = self._load(without_prefix(readable, only_first=True)) if first else self._backend
        self.strips = {
            added["content"]: (bool(added.get("lstrip")), bool(added.get("rstrip")))
            for added in source.get("added_tokens") or []
            if added["content"] in control
        }
        # The control tokens of a Unigram model remain under hidden names; encoding checks that no text becomes one.
        self._unreachable = frozenset(self.control.values()) if isinstance(model["vocab"], list) else frozenset()

    def _adds_bos(self, setting: Any, before: Sequence[str], bos: str | None) -> bool:
        if setting is None:
            if before and list(before) != [bos]:
                raise TokenizerError(
                    f"{self._where}: the file adds {' '.join(before)} before every text, expected nothing or the"
                    f" bos_token {bos}; set add_bos_token in tokenizer_config.json to true if the model was trained"
                    " with a bos_token before every text, or else to false"
                )
            return bool(before)
        if boolean(f"{self._where}: add_bos_token of tokenizer_config.json", setting, TokenizerError) and bos is None:
            raise TokenizerError(
                f"{self._where}: tokenizer_config.json sets add_bos_token but names no bos_token;"
                " add the bos_token, or set add_bos_token to false"
            )
        return bool(setting)

    def _load(self, source: Mapping[str, Any]) -> Backend:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(json.dumps(source))
        backend.encode_special_tokens = True
        backend.encode("a")  # finds damage that parsing does not
        return backend

    def _ids(self, backend: Backend, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if not self._unreachable.isdisjoint(ids):
            raise TokenizerError(
                f"{self._where}: this vocabulary turns a part of the text into a control token, which is not allowed;"
                " remove that part"
            )
        if self._missing:
            plain = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
            check_no_byte_lost(plain, lambda: b"".join(map(self.token_bytes, ids)), self._missing, self._where)
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._ids(self._backend, text)

    def _encode_after_control(self, text: str) -> list[int]:
        return self._ids(self._continuing, text)

    def _encode_joined(self, text: str) -> list[int]:
        return self._ids(self._joining, text)

    def token_bytes(self, id: int) -> bytes:
        id = self._check_id(id)
        token = self.token_of.get(id)
        hidden = token in self.control and token not in self.visible
        if token is None or hidden or token == self.unknown:
            return b""
        if self.byte_level:
            return token.encode() if token in self._added else byte_level_bytes(token)
        byte = byte_piece(token) if self._byte_fallback else None
        return piece_bytes(token) if byte is None else bytes([byte])
