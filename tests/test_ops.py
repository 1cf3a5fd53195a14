"""gnfuse/kernels/ops.py: schemas, fake kernels, autograd, and life under the compilers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from gnfuse.kernels import load, ops

load()
POINTWISE = torch.ops.gnfuse.group_norm_pointwise
DROPOUT = torch.ops.gnfuse.group_norm_dropout
MIN_CLAMP = "minimum(0.0); clamp(0.0, 1.0)"


def pointwise(
    x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, text: str, chain: str | None = None
) -> Tensor:
    return POINTWISE(x, w, b, groups, 1e-5, text if chain is None else chain, text, False)[0]


def dropout(x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, text: str, site: int = 0) -> Tensor:
    return DROPOUT(x, w, b, groups, 1e-5, text, text, True, site, False)[0]


def leaves(dtype: torch.dtype = torch.float32, channels_last: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 5, dtype=dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    return (
        x.requires_grad_(),
        torch.randn(4, dtype=dtype).requires_grad_(),
        torch.randn(4, dtype=dtype).requires_grad_(),
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("chain", ["silu()", "constant(0.0)"])
def test_opcheck_pointwise(chain: str, channels_last: bool) -> None:
    x, w, b = leaves(channels_last=channels_last)
    source = MIN_CLAMP if chain.startswith("constant") else chain
    opcheck(POINTWISE.default, (x, w, b, 2, 1e-5, chain, source, True))
    opcheck(POINTWISE.default, (x.detach(), None, b.detach(), 2, 1e-5, chain, source, False))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chain", ["silu(); dropout(0.3)", "constant(0.0); dropout(0.3)"])
def test_opcheck_dropout(chain: str, training: bool) -> None:
    x, w, b = leaves()
    source = f"{MIN_CLAMP}; dropout(0.3)" if chain.startswith("constant") else chain
    opcheck(DROPOUT.default, (x, w, b, 2, 1e-5, chain, source, training, 0, True))


def test_opcheck_backward_ops() -> None:
    x, w, b = (t.detach() for t in leaves())
    for mask in ([True, True, True], [False, True, False]):
        out, mean, rstd = POINTWISE(x, w, b, 2, 1e-5, "silu()", "silu()", False)
        args = (torch.randn_like(out), x, w, b, mean, rstd, 2, 1e-5, "silu()", "silu()", mask)
        opcheck(torch.ops.gnfuse.group_norm_pointwise_backward.default, args)
        text = "silu(); dropout(0.3)"
        out, mean, rstd, state = DROPOUT(x, w, b, 2, 1e-5, text, text, True, 0, False)
        args = (torch.randn_like(out), x, w, b, mean, rstd, state, 2, 1e-5, text, text, True, mask)
        opcheck(torch.ops.gnfuse.group_norm_dropout_backward.default, args)


def test_dropout_op_is_tagged_random() -> None:
    assert torch.Tag.nondeterministic_seeded in DROPOUT.default.tags
    assert torch.Tag.nondeterministic_seeded not in POINTWISE.default.tags


def layouts() -> list[Tensor]:
    x4 = torch.randn(2, 6, 4, 5)
    x5 = torch.randn(2, 6, 3, 4, 5)
    return [
        x4,
        x4.to(memory_format=torch.channels_last),
        x5.to(memory_format=torch.channels_last_3d),
        x4.transpose(2, 3),
        x4.transpose(0, 1).contiguous().transpose(0, 1),
        x4[:, :, 1:3],
        x4.to(memory_format=torch.channels_last)[:, :, ::2],
        torch.randn(2, 6, 1, 1).expand(2, 6, 4, 5),
        torch.randn(2, 6, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(2, 6),
        torch.randn(2, 6, 7),
        torch.randn(2, 6, 2, 2, 3, 2),
        torch.randn(0, 6, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 6, 0, 5),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    ]


@pytest.mark.parametrize("index", range(len(layouts())))
def test_strides_are_eagers_and_the_fakes(index: int) -> None:
    x = layouts()[index]
    groups = 1 if x.shape[1] == 1 else 3
    expected = torch.relu(torch.group_norm(x, groups))
    out, mean, rstd = POINTWISE(x, None, None, groups, 1e-5, "relu()", "relu()", False)
    assert out.stride() == expected.stride() and out.shape == expected.shape
    with torch._subclasses.FakeTensorMode() as mode:
        fake = POINTWISE(mode.from_tensor(x), None, None, groups, 1e-5, "relu()", "relu()", False)
    assert [f.stride() for f in fake] == [t.stride() for t in (out, mean, rstd)]
    assert [(f.shape, f.dtype) for f in fake] == [(t.shape, t.dtype) for t in (out, mean, rstd)]
    state = DROPOUT(x, None, None, groups, 1e-5, "dropout(0.5)", "dropout(0.5)", True, 0, False)[3]
    assert state.numel() == (torch.get_rng_state().numel() if x.numel() else 0)


def test_nothing_is_computed_for_inputs_that_need_no_gradient() -> None:
    x, w, b = leaves()
    mean, rstd = POINTWISE(x, w, b, 2, 1e-5, "silu()", "silu()", False)[1:]
    grads = torch.ops.gnfuse.group_norm_pointwise_backward(
        torch.ones_like(x), x, w, b, mean, rstd, 2, 1e-5, "silu()", "silu()", [False, True, False]
    )
    assert [g.numel() for g in grads] == [0, 4, 0]
    pointwise(x.detach(), w, b.detach(), 2, "silu()").sum().backward()
    assert w.grad is not None and b.grad is None


def test_statistics_are_not_differentiable() -> None:
    out, mean, rstd = POINTWISE(*leaves(), 2, 1e-5, "silu()", "silu()", False)
    assert out.requires_grad and not mean.requires_grad and not rstd.requires_grad


@pytest.mark.parametrize("text", ["silu()", "silu(); dropout(0.5)"])
def test_double_backward_raises(text: str) -> None:
    x, w, b = leaves()
    out = dropout(x, w, b, 2, text) if "dropout" in text else pointwise(x, w, b, 2, text)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        dx.sum().backward()


def test_vmap_runs_the_pointwise_op_and_refuses_the_random_one() -> None:
    x = torch.randn(3, 2, 4, 5)
    mapped = torch.vmap(lambda t: pointwise(t, None, None, 2, "relu()"))(x)
    assert torch.equal(mapped, torch.stack([pointwise(t, None, None, 2, "relu()") for t in x]))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda t: dropout(t, None, None, 2, "dropout(0.5)"), randomness="different")(x)


def test_batch_of_one_value_raises_like_f_group_norm() -> None:
    for shape in ((1, 4, 1, 1), (1, 4)):
        x = torch.randn(shape)
        with pytest.raises(ValueError) as eager:
            torch.nn.functional.group_norm(x, 4)
        with pytest.raises(ValueError) as ours:
            POINTWISE(x, None, None, 4, 1e-5, "relu()", "relu()", True)
        assert str(ours.value) == str(eager.value)
        POINTWISE(x, None, None, 4, 1e-5, "relu()", "relu()", False)  # torch.group_norm does not check


@pytest.mark.parametrize(
    ("x", "w", "b", "groups"),
    [
        (torch.randn(2, 6, 3), None, None, 4),
        (torch.randn(2, 6, 3), None, None, 0),
        (torch.randn(2, 6, 3), None, None, -1),
        (torch.randn(2, 6, 3), torch.randn(5), None, 2),
        (torch.randn(2, 6, 3), None, torch.randn(6, 1), 2),
        (torch.randn(2, 6, 3), torch.randn(6).double(), None, 2),
        (torch.randn(2, 6, 3), torch.randn(6).bfloat16(), None, 2),
        (torch.randn(2, 6, 3).half(), torch.randn(6).double(), None, 2),
        (torch.randn(2, 6, 3).half(), torch.randn(6).half(), torch.randn(6), 2),
        (torch.ones(2, 6, 3, dtype=torch.int64), None, None, 2),
    ],
)
def test_errors_are_of_eagers_type(x: Tensor, w: Tensor | None, b: Tensor | None, groups: int) -> None:
    with pytest.raises(Exception) as eager:
        torch.group_norm(x, groups, w, b)
    with pytest.raises(type(eager.value)):
        POINTWISE(x, w, b, groups, 1e-5, "relu()", "relu()", False)


def test_bad_texts_are_refused() -> None:
    x = torch.randn(2, 6, 3)
    for text in (
        "relu",
        "sillu()",
        "clamp(0.0)",
        "minimum(zero)",
        "dropout(0.5); dropout(0.5)",
        "relu(); constant(0.0)",
    ):
        with pytest.raises((RuntimeError, ValueError)):
            POINTWISE(x, None, None, 2, 1e-5, text, text, False)
    with pytest.raises(ValueError, match="without dropout"):
        POINTWISE(x, None, None, 2, 1e-5, "dropout(0.5)", "dropout(0.5)", False)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_and_equals_eager_call(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    text = "silu(); dropout(0.3)"

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return dropout(x * 2, w, b, 2, text) + pointwise(x, w, b, 2, "gelu()")

    compiled = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)
    for batch in (2, 3, 5):
        results = []
        for run in (f, compiled):
            torch.manual_seed(1)
            x = torch.randn(batch, 4, 3, 5).to(memory_format=torch.channels_last).requires_grad_()
            w, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            out = run(x, w, b)
            results.append([out, *torch.autograd.grad(out.square().sum(), (x, w, b)), torch.get_rng_state()])
        for ours, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(ours, expected)


def test_dynamic_shapes_do_not_specialise() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: pointwise(x, None, None, 2, "silu()"), backend=counter, dynamic=True)
    for batch, size in ((2, 3), (3, 3), (4, 7), (6, 2)):
        compiled(torch.randn(batch, 4, size, size + 2))
    assert counter.frame_count == 1


def test_two_sites_draw_two_masks_under_aot() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 4, 8, 8)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return dropout(x, None, None, 2, "dropout(0.5)", 0), dropout(x, None, None, 2, "dropout(0.5)", 1)

    torch.manual_seed(3)
    expected = f(x)
    torch.manual_seed(3)
    ours = torch.compile(f, backend="aot_eager")(x)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    assert not torch.equal(ours[0], ours[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_draws_the_same_mask_again(use_reentrant: bool) -> None:
    x, w, b = leaves()

    def f(x: Tensor) -> Tensor:
        return dropout(x, w, b, 2, "silu(); dropout(0.5)")

    torch.manual_seed(2)
    plain = torch.autograd.grad(f(x).sum(), x)[0]
    torch.manual_seed(2)
    checkpoint(f, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, plain)


def test_backward_draws_nothing_from_the_generator() -> None:
    x, w, b = leaves()
    out = dropout(x, w, b, 2, "dropout(0.5)")
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_no_grad_inference_and_anomaly_modes() -> None:
    x, w, b = leaves()
    expected = pointwise(x, w, b, 2, "silu()").detach()
    with torch.no_grad():
        assert torch.equal(pointwise(x, w, b, 2, "silu()"), expected)
    with torch.inference_mode():
        assert torch.equal(pointwise(x, w, b, 2, "silu()"), expected)
    with torch.autograd.set_detect_anomaly(True):
        pointwise(x, w, b, 2, "silu()").sum().backward()


def test_gradcheck_in_double() -> None:
    x, w, b = leaves(torch.float64)
    assert torch.autograd.gradcheck(lambda *t: pointwise(*t, 2, "silu(); mul(2.0); tanh()"), (x, w, b))


def test_available_gives_no_reason_once_loaded() -> None:
    assert ops.available() is None
