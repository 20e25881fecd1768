"""A complete LLaMA in one file. The package llama/ chooses the same tokens, faster.

    clearllama pull     # downloads the model, SmolLM2-135M-Instruct (98 MB)
    python scripts/one_file.py "What is the capital of Japan?"

A text is a list of tokens: words, or parts of words. The model represents each token by a vector h.
Every layer adds two vectors to h: attention collects what matters from the tokens so far, and
feed_forward transforms the result. The last token's h gives the logits, one number for each
token of the vocabulary: how well it fits next. One token is chosen and appended, and so on, until
the model chooses the token that ends its turn. Shapes are written with these letters:

    T  new tokens: the whole prompt, then 1    H   query heads, 9        C  width of h, 576
    S  all tokens so far, the new ones too     KV  key/value heads, 3    V  vocabulary, 49152
                                               D   width of a head, 64
"""

import argparse
import os
import sys
from typing import NamedTuple

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor


class Layer(NamedTuple):  # the weights of one layer
    attention_norm: Tensor  # (C,)
    wq: Tensor  # (H * D, C): outputs, then inputs, as in all matrices
    wk: Tensor  # (KV * D, C)
    wv: Tensor  # (KV * D, C)
    wo: Tensor  # (C, H * D)
    ffn_norm: Tensor  # (C,)
    w_gate: Tensor  # (hidden_dim, C), where hidden_dim is 1536
    w_up: Tensor  # (hidden_dim, C)
    w_down: Tensor  # (C, hidden_dim)


class Transformer(NamedTuple):  # all weights, and what their shapes do not determine
    tok_embeddings: Tensor  # (V, C)
    layers: list[Layer]  # 30
    norm: Tensor  # (C,)
    output: Tensor  # (V, C); in this model it is tok_embeddings
    norm_eps: float  # keeps rms_norm from dividing by 0
    head_dim: int  # D
    freqs_cis: Tensor  # (8192, D/2) complex: the rotations at each position of a text


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each vector (.., C) to a root mean square of 1, and each of its entries by a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def precompute_freqs_cis(dim: int, end: int, theta: float) -> Tensor:
    """cis(m * theta^(-2i/D)) in row m and column i, where cis(a) = cos(a) + 1j * sin(a)."""
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (D/2,)
    angles = torch.arange(end)[:, None] * inv_freq  # (end, D/2): up to 8191, so in float64
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)  # (end, D/2)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate the pairs of each head by position, so that q k^T depends only on distances."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (T, heads, D/2): entries 2i, 2i + 1
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2)  # (T, heads, D)


def attention(x: Tensor, layer: Layer, freqs_cis: Tensor, cache: Tensor, start: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in each of H heads: (T, C) -> (T, C)."""
    keys, values = cache  # (end, KV, D) each, filled below position `start`
    S, D = start + len(x), keys.shape[-1]
    q = (x @ layer.wq.T).unflatten(-1, (-1, D))  # (T, H, D)
    k = (x @ layer.wk.T).unflatten(-1, (-1, D))  # (T, KV, D)
    v = (x @ layer.wv.T).unflatten(-1, (-1, D))  # (T, KV, D)
    q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
    keys[start:S], values[start:S] = k, v
    shared = q.shape[1] // k.shape[1]  # H / KV query heads use the same keys and values
    k = keys[:S].repeat_interleave(shared, dim=1)  # (S, H, D)
    v = values[:S].repeat_interleave(shared, dim=1)  # (S, H, D)
    scores = torch.einsum("thd,shd->hts", q, k) / D**0.5  # (H, T, S)
    visible = torch.arange(S) <= torch.arange(start, S)[:, None]  # (T, S): key <= query position
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)  # (H, T, S)
    y = torch.einsum("hts,shd->thd", weights, v)  # (T, H, D)
    return y.flatten(1) @ layer.wo.T  # (T, H * D), then (T, C)


def feed_forward(x: Tensor, layer: Layer) -> Tensor:
    """w_down(silu(w_gate x) * w_up x), where silu(g) = g * sigmoid(g): (T, C) -> (T, C)."""
    gate = x @ layer.w_gate.T  # (T, hidden_dim)
    return (gate * gate.sigmoid() * (x @ layer.w_up.T)) @ layer.w_down.T  # (T, C)


def forward(model: Transformer, tokens: list[int], cache: Tensor, start: int) -> Tensor:
    """Run T tokens from position `start` on; return the logits (V,) of the token after them."""
    freqs_cis = model.freqs_cis[start : start + len(tokens)]  # (T, D/2)
    h = model.tok_embeddings[tokens]  # (T, C)
    for i, layer in enumerate(model.layers):
        x = rms_norm(h, layer.attention_norm, model.norm_eps)
        h = h + attention(x, layer, freqs_cis, cache[i], start)  # (T, C)
        x = rms_norm(h, layer.ffn_norm, model.norm_eps)
        h = h + feed_forward(x, layer)  # (T, C)
    return rms_norm(h[-1], model.norm, model.norm_eps) @ model.output.T  # (C,), then (V,)


def choose(logits: Tensor, temperature: float, top_p: float) -> int:
    """Take the likeliest token at temperature 0; otherwise sample from the top_p nucleus."""
    if temperature == 0:
        return int(logits.argmax())
    probs = (logits / temperature).softmax(-1)  # (V,)
    ordered, ids = probs.sort(descending=True, stable=True)  # (V,) each
    outside = ordered.cumsum(-1) - ordered >= top_p  # (V,): the tokens before it reach top_p
    outside[0] = False  # the likeliest token always stays
    probs[ids[outside]] = 0
    return int(torch.multinomial(probs, 1))  # it normalizes probs


def generate(model: Transformer, prompt: list[int], limit: int, temperature: float, top_p: float):
    """Yield `limit` new tokens. Keys and values are cached, so that each token is fed only once."""
    KV = len(model.layers[0].wk) // model.head_dim
    cache = torch.zeros(len(model.layers), 2, len(prompt) + limit, KV, model.head_dim)  # k, v
    tokens, start = prompt, 0
    for _ in range(limit):
        token = choose(forward(model, tokens, cache, start), temperature, top_p)
        yield token
        tokens, start = [token], start + len(tokens)


# The rest reads the file, which has the weights, and the sizes and the vocabulary as metadata.
def read_model(file: gguf.GGUFReader, metadata: dict) -> Transformer:
    """All weights in float32. Rows 2i and 2i + 1 of wq and wk are pairs, as the rotation needs."""
    w = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in file.tensors}
    names = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]  # in the order of Layer
    names += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    n_layers, end = metadata["llama.block_count"], metadata["llama.context_length"]
    head_dim = metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
    return Transformer(
        tok_embeddings=w["token_embd.weight"],
        layers=[Layer(*(w[f"blk.{i}.{name}.weight"] for name in names)) for i in range(n_layers)],
        norm=w["output_norm.weight"],
        output=w.get("output.weight", w["token_embd.weight"]),
        norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        head_dim=head_dim,
        freqs_cis=precompute_freqs_cis(head_dim, end, metadata["llama.rope.freq_base"]),
    )


def read_tokenizer(metadata: dict) -> Tokenizer:
    """Byte-level BPE: a word is split into bytes; then neighbours are joined, as `merges` lists."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    # Words are split as in GPT-2, but every digit is a word. Other model families differ.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, type in zip(tokens, types, strict=True) if type == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(control)  # <|im_end|> is one token, even if a question spells it
    return tokenizer


def chat_prompt(question: str) -> str:
    return f"""<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
{question}<|im_end|>
<|im_start|>assistant
"""


if __name__ == "__main__":
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"  # on Linux
    folder = os.environ.get("CLEARLLAMA_CACHE") or f"{user_cache}/clearllama"
    pulled = os.path.expanduser(f"{folder}/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser = argparse.ArgumentParser(description="Answer a question with SmolLM2-135M-Instruct.")
    parser.add_argument("question")
    parser.add_argument("--model", metavar="FILE", default=pulled)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not os.path.isfile(args.model):
        sys.exit(f"there is no file {args.model}; run clearllama pull, or pass --model FILE")
    file = gguf.GGUFReader(args.model)
    metadata = {name: field.contents() for name, field in file.fields.items()}
    found = f"{metadata['general.architecture']} with {metadata.get('tokenizer.ggml.pre')}"
    if found != "llama with smollm":  # the architecture, and the rule that splits text into words
        sys.exit(f"expected architecture llama with the tokenizer smollm, found {found}")
    model, tokenizer = read_model(file, metadata), read_tokenizer(metadata)

    torch.manual_seed(args.seed)
    prompt = tokenizer.encode(chat_prompt(args.question)).ids
    text = decoders.DecodeStream(skip_special_tokens=True)  # waits for a character's last byte
    for token in generate(model, prompt, args.max_new_tokens, args.temperature, args.top_p):
        if tokenizer.id_to_token(token) in ("<|im_end|>", "<|endoftext|>"):
            break
        print(text.step(tokenizer, token) or "", end="", flush=True)
    print()
