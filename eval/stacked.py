"""Many small models trained as one: R runs of one architecture are stacked along a new first dimension.

A run's parameters are one row of a matrix [R, D]; the loss of a run is an ordinary function of its row,
`torch.func.vmap` maps it over the rows, and AdamW is a handful of operations on the whole matrix, with a learning
rate and a gradient norm per row. Runs do not see each other: a run that diverges harms only itself. Hundreds of
recall models of width 64 fit one GPU this way, where one `Trainer` each would take days.
"""

import dataclasses
import math
import time

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

LOGLINEAR_MIXERS = ("linear", "mlp_softplus", "mlp_softmax", "fixed")
MIXERS = (*LOGLINEAR_MIXERS, "transformer")
IGNORED = -100  # a target that is padding
BLOCK = 50  # steps whose batches are drawn at once
PIECE = 32  # test examples drawn at once
CHECKED = 4  # runs at a time when a prepared step is checked: the eager one needs several times its memory
STEPS = ("eager", "traced", "compiled")  # see `prepare_step`


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Architecture that all mixers of an experiment share. `max_position_embeddings` sets the number of levels of the
    log-linear mixers.
    """

    vocab_size: int = 256
    hidden_size: int = 64
    num_hidden_layers: int = 2
    state_size: int = 16
    head_dim: int = 32
    chunk_size: int = 32
    max_position_embeddings: int = 128
    mlp_intermediate_size: int | None = None
    initializer_range: float | None = None  # None: the library's default for the class
    lambda_bias_init: float | None = None  # of the modes with an MLP; None: the library's default
    tie_word_embeddings: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Optimisation that all runs of an experiment share: AdamW, linear warm-up and a cosine down to zero."""

    steps: int = 6000
    batch_size: int = 32
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float = 1.0

    def rate(self, step):
        """Factor on the peak learning rate at 0-based `step`."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


@dataclasses.dataclass(frozen=True)
class Run:
    """One model to train. `task` is a frozen dataclass with `vocab_size`, `length`, `answers`, `stage(progress)` and
    `batch(count, generator)`.
    """

    mixer: str
    task: object
    learning_rate: float
    seed: int


@dataclasses.dataclass
class Outcome:
    """What training a stack gave: weights [R, D], learning curves [R, points] of accuracy and loss, seconds for the
    whole stack.
    """

    weights: torch.Tensor
    accuracy: torch.Tensor
    loss: torch.Tensor
    seconds: float


def build_model(mixer, sizes, seed=0):
    """A freshly initialised causal LM of `sizes` whose sequence mixer is one of `MIXERS`, through the public classes.
    Raises ValueError for an unknown mixer.
    """
    set_seed(seed)
    if mixer == "transformer":
        config = LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.num_hidden_layers,
            num_attention_heads=sizes.hidden_size // sizes.head_dim,
            # About the parameters of the recurrent block: attention 4 D^2 and SwiGLU 3 D I against 6 D^2 and more.
            intermediate_size=sizes.mlp_intermediate_size or sizes.hidden_size,
            max_position_embeddings=sizes.max_position_embeddings,
            **{k: v for k, v in {"initializer_range": sizes.initializer_range}.items() if v is not None},
            tie_word_embeddings=sizes.tie_word_embeddings,
            attn_implementation="eager",
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if mixer not in LOGLINEAR_MIXERS:
        raise ValueError(f"mixer is {mixer!r}; allowed are {', '.join(MIXERS)}")
    from modeling_loglinear import LogLinearConfig, LogLinearForCausalLM

    config = LogLinearConfig(
        expand=2,
        num_heads=2 * sizes.hidden_size // sizes.head_dim,
        n_groups=1,
        lambda_mode=mixer,
        use_cache=False,
        pad_token_id=None,
        **{name: value for name, value in dataclasses.asdict(sizes).items() if value is not None},
    )
    return LogLinearForCausalLM(config)


def draw(tasks, seeds, split, block, count, device):
    """Block number `block` of `count` examples of each task, from a stream that depends on (seed, split, task, block)
    alone.

    Runs with the same task and seed share their examples, so mixers are compared on the same data. Returns ids [R,
    count, T], positions [R, count, K],
    targets [R, count, K]; K is the largest number of answers, and shorter rows end in `IGNORED` targets.
    """
    answers = max(task.answers for task in tasks)
    streams = {}
    for task, seed in zip(tasks, seeds, strict=True):
        if (task, seed) not in streams:
            generator = torch.Generator(device).manual_seed(stream_seed(seed, split, block))
            ids, positions, targets = task.batch(count, generator)
            missing = (0, answers - task.answers)
            streams[task, seed] = (
                ids,
                nn.functional.pad(positions, missing),
                nn.functional.pad(targets, missing, value=IGNORED),
            )
    rows = [list(streams).index(pair) for pair in zip(tasks, seeds, strict=True)]
    return tuple(torch.stack(part)[rows] for part in zip(*streams.values(), strict=True))


def stream_seed(seed, split, block):
    """A 63-bit seed for a block of examples; splits ("train", "test") and blocks never share one."""
    split = {"train": 0, "test": 1}[split]
    mixed = (seed * 2 + split) * 1_000_003 + block
    return (mixed * 0x9E3779B97F4A7C15) % (1 << 63)


class Stack:
    """R models of one architecture as one matrix of weights, with the functions to train and to test them.

    Args:
        models: R modules of one class and config (their initial weights differ).
        device: where to compute.
    """

    def __init__(self, models, device):
        rows = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
        self.initial = torch.stack(rows).to(device)
        self.template = _AtPositions(models[0]).to(device)
        named = dict(self.template.named_parameters())
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        self.lengths = [p.numel() for p in named.values()]
        self.decayed = torch.cat([torch.full((p.numel(),), float(_is_decayed(n, p))) for n, p in named.items()]).to(device)

    def unflatten(self, vector):
        """Row [D] -> parameters by name."""
        parts = vector.split(self.lengths)
        return {n: part.view(shape) for n, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def model(self, vector):
        """The causal LM with the weights of one row [D], ready to be saved."""
        self.template.load_state_dict(self.unflatten(vector), strict=False)
        return self.template.model

    def loss(self, vector, ids, positions, targets):
        """Mean cross-entropy and accuracy of one run at the answer positions."""
        logits = functional_call(self.template, self.unflatten(vector), (ids, positions))  # [B, K, V]
        real = targets != IGNORED
        wanted = targets.clamp(min=0).unsqueeze(-1)
        # Picked by a comparison: the gradient of an index is a scatter, which a GPU adds one by one.
        picked = torch.where(torch.arange(logits.shape[-1], device=logits.device) == wanted, logits, 0).sum(-1)
        surprise = logits.logsumexp(-1) - picked
        count = real.sum()
        hits = (logits.argmax(-1) == targets) & real
        return (surprise * real).sum() / count, hits.sum() / count

    def step(self, recipe):
        """One AdamW step of all rows: (weights, first, second, rate [R], count, ids, positions, targets) -> the first
        three, and loss, accuracy [R].
        """
        per_run = vmap(grad_and_value(self.loss, has_aux=True))
        beta1, beta2 = recipe.beta1, recipe.beta2

        def step(weights, first, second, rate, count, ids, positions, targets):
            grads, (loss, accuracy) = per_run(weights, ids, positions, targets)
            norm = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
            grads = grads * (recipe.clip_norm / (norm + 1e-6)).clamp(max=1)
            first = beta1 * first + (1 - beta1) * grads
            second = beta2 * second + (1 - beta2) * grads.square()
            scale = (second / (1 - beta2**count)).sqrt() + 1e-8
            move = first / (1 - beta1**count) / scale + recipe.weight_decay * self.decayed * weights
            return weights - rate[:, None] * move, first, second, loss, accuracy

        return step

    def evaluate(self, weights, tasks, seeds, examples, tokens_at_once=2**18):
        """Loss and accuracy [R] on `examples` test examples per run (a multiple of `PIECE`), about `tokens_at_once`
        tokens in memory at a time.
        """
        rows = max(1, tokens_at_once // (PIECE * tasks[0].length))
        pieces = examples // PIECE
        loss, accuracy = torch.zeros(2, len(tasks), device=weights.device)
        with torch.no_grad():
            for piece in range(pieces):
                parts = vmap(self.loss, chunk_size=rows)(weights, *draw(tasks, seeds, "test", piece, PIECE, weights.device))
                loss, accuracy = loss + parts[0] / pieces, accuracy + parts[1] / pieces
        return loss, accuracy


class _AtPositions(nn.Module):
    """A causal LM that computes logits only where an answer is due: ids [B, T], positions [B, K] -> [B, K, V].

    K = T means every position in order, as in language modelling.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, positions):
        mask = None
        if self.model.config.model_type == "llama":
            square = torch.full((ids.shape[1],) * 2, torch.finfo(torch.float32).min, device=ids.device)
            mask = square.triu(1)[None, None]
        # Given embeddings and a full mask, the models do not look into the data, which a mapped program cannot do.
        embeddings = self.model.get_input_embeddings()(ids)
        hidden = self.model.base_model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).last_hidden_state
        if positions.shape[1] < ids.shape[1]:
            hidden = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        return self.model.get_output_embeddings()(hidden)


def _is_decayed(name, parameter):
    """Weight matrices decay; biases, norms, and what makes lambda do not, so that no lambda mode is pulled to a
    special point.
    """
    return parameter.ndim >= 2 and "lambda_head" not in name


def prepare_step(step, kind, *example):
    """`step` made faster for the shapes of `example`.

    "eager" is the step itself; "traced" records it once, through vmap and grad, as a list of plain tensor operations, so that
    Python works little per step; "compiled" generates kernels from that list: about half the memory traffic on a GPU, for
    about a minute of compilation.

    Raises RuntimeError if, on the example, the gradients are not those of the step itself.
    """
    if kind == "eager":
        return step
    prepared = _fold_constants(make_fx(step)(*example))
    if kind == "compiled":
        prepared = torch.compile(prepared, dynamic=False)
    found = prepared(*example)[1]  # first moments, (1 - beta1) * gradient after the first step
    for start in range(0, len(found), CHECKED):
        rows = slice(start, start + CHECKED)
        wanted = step(*(part[rows] if part.dim() else part for part in example))[1]
        error = ((found[rows] - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
        if not error < 0.03:  # the matrix products may be TF32
            raise RuntimeError(f"the {kind} step differs from the eager one by {error:.3g} (relative, worst run)")
    if found.is_cuda:
        torch.cuda.empty_cache()  # eager steps need more memory than what follows: other processes may have it
    return prepared


def _fold_constants(graph, most=65_536):
    """Replace what depends on no input (index tables and masks of up to `most` elements) by its value: less to compile."""
    values = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(graph, node.target)
        elif node.op == "call_function" and all(parent in values for parent in node.all_input_nodes):
            known = [torch.fx.node.map_arg(part, values.__getitem__) for part in (node.args, node.kwargs)]
            values[node] = node.target(*known[0], **known[1])
    for number, (node, value) in enumerate(values.items()):
        outside = [user for user in node.users if user not in values]
        if node.op == "call_function" and outside and isinstance(value, torch.Tensor) and value.numel() <= most:
            graph.register_buffer(f"folded_{number}", value)
            with graph.graph.inserting_before(node):
                constant = graph.graph.get_attr(f"folded_{number}")
            for user in outside:
                user.replace_input_with(node, constant)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def train_stack(runs, stack, recipe, kind="eager", prepared=None, points=24, label=""):
    """Train every run of a stack; returns an `Outcome`.

    Args:
        runs: R runs whose tasks have one length at any time.
        stack: their `Stack`.
        recipe: the `Recipe`.
        kind: how steps run, one of `STEPS`.
        prepared: a dict that keeps prepared steps by shape, for the next stacks of this mixer.
        points: points of the learning curves, each a mean over the steps since the last one.
        label: text of the progress bar.
    """
    prepared = {} if prepared is None else prepared
    device, seeds = stack.initial.device, [run.seed for run in runs]
    weights = stack.initial.clone()
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    peak = torch.tensor([run.learning_rate for run in runs], device=device)
    curves = torch.zeros(2, points, len(runs), device=device)
    counts = torch.zeros(points, device=device)
    start = time.perf_counter()
    bar = tqdm(total=recipe.steps, desc=label, mininterval=2, smoothing=0.05)
    for step in range(recipe.steps):
        if step % BLOCK == 0:
            tasks = [run.task.stage(step / recipe.steps) for run in runs]
            block = draw(tasks, seeds, "train", step // BLOCK, BLOCK * recipe.batch_size, device)
        batch = [part[:, step % BLOCK :: BLOCK] for part in block]
        rate, count = peak * recipe.rate(step), torch.tensor(float(step + 1), device=device)
        state = (weights, first, second, rate, count, *batch)
        shapes = tuple(part.shape for part in state)
        if shapes not in prepared:
            prepared[shapes] = prepare_step(stack.step(recipe), kind, *state)
        weights, first, second, loss, accuracy = prepared[shapes](*state)
        point = step * points // recipe.steps
        curves[:, point] += torch.stack([accuracy, loss])
        counts[point] += 1
        bar.update()
        if step % BLOCK == BLOCK - 1:
            bar.set_postfix_str(f"accuracy {accuracy.mean():.3f}, best {accuracy.max():.3f}")
    bar.close()
    accuracy, loss = (curves / counts.clamp(min=1)[:, None]).transpose(1, 2).cpu()
    return Outcome(weights, accuracy, loss, time.perf_counter() - start)
