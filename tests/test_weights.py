"""Weights of torch and of transformers in JAX: made here at random, the same logits, and back.

Each forward is written by hand from the architecture's definition. What a user writes for a model is its mapping,
`rename` and `transform`. Nothing is downloaded.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.helpers import assert_trees_equal, need
from tsunax.checkpoints import exchange
from tsunax.checkpoints.exchange import rearrange, torch_kernel, torch_name

pytestmark = pytest.mark.slow

D, H, L, V, T = 32, 4, 3, 48, 12  # width, heads, layers, tokens known, tokens in a row

# ------------------------------------------------------------------------------------- what the models have in common


def layer_norm(x, p, epsilon):
    z = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + epsilon)
    return z * p["scale"] + p["bias"]


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def to_heads(x, p):
    return jnp.einsum("bti,ihd->bthd", x, p["kernel"]) + p.get("bias", 0)


def from_heads(x, p):
    return jnp.einsum("bthd,hdo->bto", x, p["kernel"]) + p.get("bias", 0)


def attention(q, k, v, mask=None):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def causal(x):
    return jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))


def scanned(block, x, layers):
    return jax.lax.scan(lambda x, p: (block(x, p), None), x, layers)[0]


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def norm(*shape):
    return {"scale": struct(*shape), "bias": struct(*shape)}


# ---------------------------------------------------------------------------------------------------------------- GPT-2


def gpt2_like():
    block = {
        "ln_1": norm(L, D),
        "attn": {
            "c_attn": {"kernel": struct(L, D, 3, H, D // H), "bias": struct(L, 3, H, D // H)},
            "c_proj": {"kernel": struct(L, H, D // H, D), "bias": struct(L, D)},
        },
        "ln_2": norm(L, D),
        "mlp": {
            "c_fc": {"kernel": struct(L, D, 4 * D), "bias": struct(L, 4 * D)},
            "c_proj": {"kernel": struct(L, 4 * D, D), "bias": struct(L, D)},
        },
    }
    tables = {"wte": {"embedding": struct(V, D)}, "wpe": {"embedding": struct(T, D)}}
    return {**tables, "h": block, "ln_f": norm(D)}


def gpt2_mapping():
    return {
        "rename": lambda name: "transformer." + re.sub(r"^h\.", "h.{}.", torch_name(name)),
        "transform": {  # its Conv1D is as flax's Linear: in, out
            "h/attn/c_attn/kernel": rearrange("i (three h d) -> i three h d", three=3, h=H),
            "h/attn/c_attn/bias": rearrange("(three h d) -> three h d", three=3, h=H),
            "h/attn/c_proj/kernel": rearrange("(h d) o -> h d o", h=H),
        },
    }


def gpt2(params, tokens):
    def block(x, p):
        y = layer_norm(x, p["ln_1"], 1e-5)
        qkv = jnp.einsum("bti,ichd->cbthd", y, p["attn"]["c_attn"]["kernel"])
        q, k, v = qkv + p["attn"]["c_attn"]["bias"][:, None, None]
        x = x + from_heads(attention(q, k, v, causal(x)), p["attn"]["c_proj"])
        y = jax.nn.gelu(linear(layer_norm(x, p["ln_2"], 1e-5), p["mlp"]["c_fc"]), approximate=True)
        return x + linear(y, p["mlp"]["c_proj"])

    x = params["wte"]["embedding"][tokens] + params["wpe"]["embedding"][: tokens.shape[1]]
    x = layer_norm(scanned(block, x, params["h"]), params["ln_f"], 1e-5)
    return x @ params["wte"]["embedding"].T


def gpt2_torch(transformers):
    config = transformers.GPT2Config(n_embd=D, n_head=H, n_layer=L, vocab_size=V, n_positions=T)
    return transformers.GPT2LMHeadModel(config)


# ----------------------------------------------------------------------------------------------------------------- BERT


def bert_like():
    heads = {"kernel": struct(L, D, H, D // H), "bias": struct(L, H, D // H)}
    out = {"kernel": struct(L, H, D // H, D), "bias": struct(L, D)}
    layer = {
        "attention": {
            "self": {name: heads for name in ("query", "key", "value")},
            "output": {"dense": out, "LayerNorm": norm(L, D)},
        },
        "intermediate": {"dense": {"kernel": struct(L, D, 2 * D), "bias": struct(L, 2 * D)}},
        "output": {"dense": {"kernel": struct(L, 2 * D, D), "bias": struct(L, D)}, "LayerNorm": norm(L, D)},
    }
    tables = {"word": V, "position": T, "token_type": 2}
    embeddings = {f"{name}_embeddings": {"embedding": struct(n, D)} for name, n in tables.items()}
    return {
        "embeddings": {**embeddings, "LayerNorm": norm(D)},
        "layer": layer,
        "pooler": {"dense": {"kernel": struct(D, D), "bias": struct(D)}},
        "classifier": {"kernel": struct(D, 5), "bias": struct(5)},
    }


def bert_mapping():
    def rename(name):
        name = re.sub(r"^layer\.", "encoder.layer.{}.", torch_name(name))
        return name if name.startswith("classifier") else "bert." + name

    return {
        "rename": rename,
        "transform": {
            "layer/attention/self/*/kernel": rearrange("(h d) i -> i h d", h=H),
            "layer/attention/self/*/bias": rearrange("(h d) -> h d", h=H),
            "layer/attention/output/dense/kernel": rearrange("o (h d) -> h d o", h=H),
            "**/kernel": torch_kernel,
        },
    }


def bert(params, tokens):
    def block(x, p):
        q, k, v = (to_heads(x, p["attention"]["self"][name]) for name in ("query", "key", "value"))
        y = from_heads(attention(q, k, v), p["attention"]["output"]["dense"])
        x = layer_norm(x + y, p["attention"]["output"]["LayerNorm"], 1e-12)
        y = jax.nn.gelu(linear(x, p["intermediate"]["dense"]), approximate=False)
        return layer_norm(x + linear(y, p["output"]["dense"]), p["output"]["LayerNorm"], 1e-12)

    tables = {name: p.get("embedding") for name, p in params["embeddings"].items()}
    x = tables["word_embeddings"][tokens] + tables["position_embeddings"][: tokens.shape[1]]
    x = layer_norm(x + tables["token_type_embeddings"][0], params["embeddings"]["LayerNorm"], 1e-12)
    x = scanned(block, x, params["layer"])
    return linear(jnp.tanh(linear(x[:, 0], params["pooler"]["dense"])), params["classifier"])


def bert_torch(transformers):
    sizes = dict(hidden_size=D, num_attention_heads=H, num_hidden_layers=L, intermediate_size=2 * D, vocab_size=V)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, max_position_embeddings=T, num_labels=5)
    )


# ------------------------------------------------------------------------------------------------------------------ ViT


def vit_like():
    like = bert_like()
    layer = {
        "attention": {
            "attention": like["layer"]["attention"]["self"],
            "output": {"dense": like["layer"]["attention"]["output"]["dense"]},
        },
        "intermediate": like["layer"]["intermediate"],
        "output": {"dense": like["layer"]["output"]["dense"]},
        "layernorm_before": norm(L, D),
        "layernorm_after": norm(L, D),
    }
    patches = {"projection": {"kernel": struct(4, 4, 3, D), "bias": struct(D)}}
    embeddings = {"cls_token": struct(1, 1, D), "position_embeddings": struct(1, 10, D), "patch_embeddings": patches}
    return {"embeddings": embeddings, "layer": layer, "layernorm": norm(D), "classifier": like["classifier"]}


def vit_mapping():
    def rename(name):
        name = re.sub(r"^layer\.", "encoder.layer.{}.", torch_name(name))
        return name if name.startswith("classifier") else "vit." + name

    return {
        "rename": rename,
        "transform": {
            "layer/attention/attention/*/kernel": rearrange("(h d) i -> i h d", h=H),
            "layer/attention/attention/*/bias": rearrange("(h d) -> h d", h=H),
            "layer/attention/output/dense/kernel": rearrange("o (h d) -> h d o", h=H),
            "**/kernel": torch_kernel,  # of the patches, too
        },
    }


def vit(params, images):
    def block(x, p):
        y = layer_norm(x, p["layernorm_before"], 1e-12)
        q, k, v = (to_heads(y, p["attention"]["attention"][name]) for name in ("query", "key", "value"))
        x = x + from_heads(attention(q, k, v), p["attention"]["output"]["dense"])
        y = jax.nn.gelu(
            linear(layer_norm(x, p["layernorm_after"], 1e-12), p["intermediate"]["dense"]), approximate=False
        )
        return x + linear(y, p["output"]["dense"])

    table = params["embeddings"]
    projection, images = table["patch_embeddings"]["projection"], jnp.moveaxis(images, 1, -1)
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, projection["kernel"], (4, 4), "VALID", dimension_numbers=layout)
    x = (x + projection["bias"]).reshape(len(x), -1, D)
    x = jnp.concatenate([jnp.broadcast_to(table["cls_token"], (len(x), 1, D)), x], 1) + table["position_embeddings"]
    x = layer_norm(scanned(block, x, params["layer"]), params["layernorm"], 1e-12)
    return linear(x[:, 0], params["classifier"])


def vit_torch(transformers):
    sizes = dict(hidden_size=D, num_attention_heads=H, num_hidden_layers=L, intermediate_size=2 * D)
    config = transformers.ViTConfig(**sizes, image_size=12, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config)


# ---------------------------------------------------------------------------------------------------------------- Llama

KV = 2  # heads of keys and values


def llama_like():
    kernel = lambda *shape: {"kernel": struct(L, *shape)}
    attn = {"q_proj": kernel(D, H, D // H), "k_proj": kernel(D, KV, D // H), "v_proj": kernel(D, KV, D // H)}
    layer = {
        "self_attn": {**attn, "o_proj": kernel(H, D // H, D)},
        "mlp": {"gate_proj": kernel(D, 2 * D), "up_proj": kernel(D, 2 * D), "down_proj": kernel(2 * D, D)},
        "input_layernorm": {"scale": struct(L, D)},
        "post_attention_layernorm": {"scale": struct(L, D)},
    }
    head = {"norm": {"scale": struct(D)}, "lm_head": {"kernel": struct(D, V)}}
    return {"embed_tokens": {"embedding": struct(V, D)}, "layers": layer, **head}


def llama_mapping():
    def rename(name):
        name = torch_name(name).replace("layers.", "layers.{}.")
        return name if name.startswith("lm_head") else "model." + name

    return {
        "rename": rename,
        "transform": {  # rotary embeddings turn halves there, neighbors here
            "layers/self_attn/q_proj/kernel": rearrange("(h two d) i -> i h (d two)", h=H, two=2),
            "layers/self_attn/k_proj/kernel": rearrange("(h two d) i -> i h (d two)", h=KV, two=2),
            "layers/self_attn/v_proj/kernel": rearrange("(h d) i -> i h d", h=KV),
            "layers/self_attn/o_proj/kernel": rearrange("o (h d) -> h d o", h=H),
            "**/kernel": torch_kernel,
        },
    }


def llama(params, tokens):
    def rms(x, p):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]

    def rotated(x):
        """Each pair of neighbors turned by its angle, as in the paper."""
        frequencies = 10000.0 ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
        angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[:, None]
        a, b = x[..., ::2], x[..., 1::2]
        pairs = [a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)]
        return jnp.stack(pairs, -1).reshape(x.shape)

    def block(x, p):
        y = rms(x, p["input_layernorm"])
        q, k, v = (to_heads(y, p["self_attn"][f"{name}_proj"]) for name in "qkv")
        k, v = (jnp.repeat(z, H // KV, 2) for z in (rotated(k), v))
        x = x + from_heads(attention(rotated(q), k, v, causal(x)), p["self_attn"]["o_proj"])
        y = rms(x, p["post_attention_layernorm"])
        y = jax.nn.silu(linear(y, p["mlp"]["gate_proj"])) * linear(y, p["mlp"]["up_proj"])
        return x + linear(y, p["mlp"]["down_proj"])

    x = scanned(block, params["embed_tokens"]["embedding"][tokens], params["layers"])
    return linear(rms(x, params["norm"]), params["lm_head"])


def llama_torch(transformers):
    sizes = dict(hidden_size=D, num_attention_heads=H, num_key_value_heads=KV, num_hidden_layers=L)
    config = transformers.LlamaConfig(
        **sizes, intermediate_size=2 * D, vocab_size=V, max_position_embeddings=T, rms_norm_eps=1e-6
    )
    return transformers.LlamaForCausalLM(config)


# ---------------------------------------------------------------------------------------------------------------- tests

MODELS = {
    "gpt2": (gpt2_torch, gpt2_like, gpt2_mapping, gpt2),
    "bert": (bert_torch, bert_like, bert_mapping, bert),
    "vit": (vit_torch, vit_like, vit_mapping, vit),
    "llama": (llama_torch, llama_like, llama_mapping, llama),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_transformers_and_back(name, tmp_path):
    torch, transformers = need("torch"), need("transformers")
    make, like, mapping, forward = MODELS[name]
    torch.manual_seed(0)
    model = make(transformers).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and scales as well
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(tmp_path / "theirs")

    params = exchange.restore(tmp_path / "theirs", like(), **mapping())
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 3, 12, 12)).astype(np.float32)
    x = images if name == "vit" else rng.integers(0, V, (2, T))
    with torch.no_grad():
        expected = model(torch.from_numpy(x)).logits.numpy()
    with jax.numpy_rank_promotion("allow"):
        logits = np.asarray(jax.jit(forward)(params, x))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)

    model.config.save_pretrained(tmp_path / "ours")
    exchange.save(tmp_path / "ours" / "model.safetensors", params, **mapping())
    assert_trees_equal(exchange.restore(tmp_path / "ours"), exchange.restore(tmp_path / "theirs"))
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        np.testing.assert_array_equal(again.eval()(torch.from_numpy(x)).logits.numpy(), expected)


def test_modules_of_torch_and_back(tmp_path):
    """Linear, convolutions, an embedding, norms, by the default pair."""
    torch = need("torch")
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(7, 4, rngs=rngs)
            self.conv1 = nnx.Conv(4, 6, (3,), padding="VALID", rngs=rngs)
            self.conv2 = nnx.Conv(2, 6, (3, 2), padding="VALID", rngs=rngs)
            self.groups = nnx.Conv(6, 6, (2, 2), padding="VALID", feature_group_count=3, rngs=rngs)
            self.norm = nnx.LayerNorm(4, epsilon=1e-5, rngs=rngs)
            self.batch = nnx.BatchNorm(6, use_running_average=True, epsilon=1e-5, rngs=rngs)
            self.linear = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, tokens, images):
            a = self.conv1(self.norm(self.table(tokens))).mean(1)
            b = self.batch(self.groups(self.conv2(jnp.moveaxis(images, 1, -1)))).mean((1, 2))
            return self.linear(jnp.tanh(a) + b)

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(7, 4)
            self.conv1 = torch.nn.Conv1d(4, 6, 3)
            self.conv2 = torch.nn.Conv2d(2, 6, (3, 2))
            self.groups = torch.nn.Conv2d(6, 6, 2, groups=3)
            self.norm = torch.nn.LayerNorm(4)
            self.batch = torch.nn.BatchNorm2d(6)
            self.linear = torch.nn.Linear(6, 3)

        def forward(self, tokens, images):
            a = self.conv1(self.norm(self.table(tokens)).transpose(1, 2)).mean(2)
            b = self.batch(self.groups(self.conv2(images))).mean((2, 3))
            return self.linear(torch.tanh(a) + b)

    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    theirs = Theirs()
    tokens, images = torch.randint(0, 7, (2, 9)), torch.randn(2, 2, 6, 5)
    theirs.train()(tokens, images)  # batch statistics
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        expected = theirs.eval()(tokens, images).numpy()
    counted = {name: x for name, x in theirs.state_dict().items() if not name.endswith("num_batches_tracked")}
    save_file(counted, tmp_path / "theirs.safetensors")
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), (nnx.Param, nnx.BatchStat), ...)
    how = {"rename": torch_name, "transform": {"**/kernel": torch_kernel}}
    params = exchange.restore(tmp_path / "theirs.safetensors", params, **how)
    with jax.numpy_rank_promotion("allow"):
        found = nnx.merge(graph, params, rest)(jnp.asarray(tokens.numpy()), jnp.asarray(images.numpy()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    exchange.save(tmp_path / "ours.safetensors", params, **how)
    again = Theirs()
    again.load_state_dict(load_file(tmp_path / "ours.safetensors"), strict=False)
    with torch.no_grad():
        np.testing.assert_array_equal(again.eval()(tokens, images).numpy(), expected)
