"""Forms of mlx-lm's attention, cache and RoPE. A method has a form if its bytecode is equal.

They never run. A docstring would be one constant more.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"
# ruff: noqa: RUF059

from typing import Any

import mlx.core as mx

scaled_dot_product_attention: Any = None


# Llama, Qwen 2, Gemma and others.
def attention(self, x, mask=None, cache=None):
    B, L, D = x.shape

    queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)

    queries = queries.reshape(B, L, self.n_heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)

    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)

    output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.o_proj(output)


# Qwen 3.
def attention_with_norms(self, x, mask=None, cache=None):
    B, L, D = x.shape

    queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)

    queries = self.q_norm(queries.reshape(B, L, self.n_heads, -1)).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(B, L, self.n_kv_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)

    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)

    output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.o_proj(output)


def update_and_fetch(self, keys, values):
    prev = self.offset
    if self.keys is None or (prev + keys.shape[2]) > self.keys.shape[2]:
        B, n_kv_heads, _, k_head_dim = keys.shape
        v_head_dim = values.shape[3]
        n_steps = (self.step + keys.shape[2] - 1) // self.step
        k_shape = (B, n_kv_heads, n_steps * self.step, k_head_dim)
        v_shape = (B, n_kv_heads, n_steps * self.step, v_head_dim)
        new_k = mx.zeros(k_shape, keys.dtype)
        new_v = mx.zeros(v_shape, values.dtype)
        if self.keys is not None:
            if prev % self.step != 0:
                self.keys = self.keys[..., :prev, :]
                self.values = self.values[..., :prev, :]
            self.keys = mx.concatenate([self.keys, new_k], axis=2)
            self.values = mx.concatenate([self.values, new_v], axis=2)
        else:
            self.keys, self.values = new_k, new_v

    self.offset += keys.shape[2]
    self.keys[..., prev : self.offset, :] = keys
    self.values[..., prev : self.offset, :] = values
    return self.keys_and_values()


def keys_and_values(self):
    if self.offset < self.keys.shape[2]:
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]
    else:
        return self.keys, self.values


# Llama 3.
def rope_of_frequencies(self, x, offset=0):
    return mx.fast.rope(
        x,
        self.dims,
        traditional=self.traditional,
        base=None,
        scale=1.0,
        offset=offset,
        freqs=self._freqs,
    )
