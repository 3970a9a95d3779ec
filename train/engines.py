"""How several processes train one drafter: DDP through accelerate, torch's FSDP2, DeepSpeed's ZeRO. What differs between them is in this file.

The launcher decides, not the recipe (`recipes/accelerate/`): `accelerate launch --config_file fsdp2.yaml -m draftsmith.train RECIPE`. Without a GPU:

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m draftsmith.train RECIPE                                              DDP (gloo)
    ACCELERATE_USE_CPU=true ACCELERATE_USE_FSDP=true FSDP_VERSION=2 torchrun --nproc_per_node 2 -m draftsmith.train RECIPE      FSDP2
    ACCELERATE_USE_CPU=true ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_CONFIG_FILE=recipes/accelerate/zero2.json torchrun ...

accelerate alone would not engage FSDP or DeepSpeed on a CPU; here they are driven directly, on CPU and GPU alike. All engines compute the same step:
gradients are the mean over the global batch's micro-batches, clipped by their global norm. A state is whole and keyed by parameter names, so that
what one engine wrote another goes on from.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .. import UserError
from ..decode.target import Step as Features
from ..decode.target import Target
from ..recipes.schema import Train
from .activations import recompute_activations
from .objectives.common import Batch, Objective
from .optimizers import make_optimizers
from .stream import Share
from .trainee import Trainee, TunedTrainee

OptimizerState = dict[str, dict[str, Tensor]]  # by parameter: its moments, whole, and `step`


class Loss(nn.Module):
    """The objective with all that it trains as one module: engines that gather parameters do so for the whole of its forward pass."""

    def __init__(self, trainee: Trainee, objective: Objective, train: Train, device: torch.device) -> None:
        super().__init__()
        self.trained = trainee.module
        self._drafter = [trainee.drafter]  # in a list: no second name for its parameters
        self._objective = objective
        self._dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.mixed_precision]
        self._device = device
        self._run: Callable[..., Any] = torch.compile(self.trained) if train.compile else self.trained

    def forward(self, target: Target, batch: Batch, features: Features | None) -> tuple[Tensor, dict[str, float]]:
        model = self._run if self._dtype is None else self._autocast
        return self._objective(cast(nn.Module, model), self._drafter[0], target, batch, features)

    def _autocast(self, *args: Any) -> Any:
        """The module in half precision; what it returns is float32, as losses want it."""
        with torch.autocast(self._device.type, dtype=self._dtype):
            return _float(self._run(*args))


def _float(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_float(part) for part in value)
    return value


class Engine(ABC):
    """Trains what is in a `Loss`. Its parameters have the values to start from when it is made.

    Every method is called by all processes, in the same order.
    """

    name: str
    sharded = False  # whether a process has only a part of the parameters
    scaler: Any = None  # of gradients: float16 needs one

    def __init__(self, loss: Loss, trainee: Trainee) -> None:
        self.loss, self.trainee = loss, trainee
        self.model: Callable[..., tuple[Tensor, dict[str, float]]] = loss
        self.optimizers: list[Any] = []

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients are exchanged only for the last one of a step."""
        yield

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of loss over the number of micro-batches."""

    @abstractmethod
    def clip(self) -> float:
        """Clip the gradient. Its norm before, over all processes; NaN or infinite if it is not finite."""

    @abstractmethod
    def step(self) -> None:
        """The optimizer step."""

    def set_lr(self, lr: float) -> None:
        """The scheduled learning rate, which every group multiplies by its scale."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = lr * group["lr_scale"]

    @contextlib.contextmanager
    def whole(self, main: bool, rebuild: Callable[[], Trainee]) -> Iterator[Trainee]:
        """What is trained with all its parameters in the main process, to be measured and saved; others must not use it.

        Of a sharded one it is a copy: the original would gather parameters from processes that do not take part.
        """
        if not self.sharded:
            yield self.trainee
            return
        state, copy = self.model_state(), self.trainee
        if main:
            with torch.random.fork_rng():
                copy = rebuild()
            copy.module.load_state_dict(state)
        yield copy

    def model_state(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, whole."""
        return {name: _gathered(tensor.detach()) for name, tensor in self.trainee.module.state_dict().items()}

    def optimizer_state(self) -> OptimizerState:
        """Whole. In one order in all processes, as gathering is a conversation: a file's tensors come in any."""
        states = {p: sorted(state.items()) for optimizer in self.optimizers for p, state in optimizer.state.items()}
        named = self.trainee.module.named_parameters()
        return {name: {key: _gathered(torch.as_tensor(value)) for key, value in states[p]} for name, p in named if p in states}

    def scaler_state(self) -> dict[str, Any]:
        """Nothing without a scaler."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_scaler(self, state: dict[str, Any]) -> None:
        """Go on with this scale; nothing: with a new one."""
        if state and self.scaler is not None:
            self.scaler.load_state_dict(state)

    def load_optimizer(self, state: OptimizerState) -> None:
        """Go on from a state. Raises UserError if it is of another optimizer."""
        named = dict(self.trainee.module.named_parameters())
        for optimizer in self.optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)
            names = {id(p): name for name, p in named.items()}
            for group in inner.param_groups:
                for p in group["params"]:
                    if names[id(p)] in state:
                        fused = bool(group.get("fused") or group.get("capturable"))
                        inner.state[p] = {key: _like(key, value, p, fused) for key, value in state[names[id(p)]].items()}


def _like(key: str, value: Tensor, parameter: Tensor, fused: bool) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if key == "step":
        return value.clone().to(parameter.device if fused else "cpu")
    value = value.clone().to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None) if isinstance(parameter, DTensor) else value


def _gathered(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True).contiguous()


class Plain(Engine):
    """One process, or DDP: every process has all of the drafter."""

    def __init__(self, loss: Loss, trainee: Trainee, train: Train, share: Share, accelerator: Accelerator) -> None:
        super().__init__(loss, trainee)
        self.name = "ddp" if share.processes > 1 else "single"
        self.accelerator, self.clip_norm, self.micro_batches = accelerator, train.clip_norm, len(share.micro_batches)
        self.scaler = accelerator.scaler
        self.model, *self.optimizers = accelerator.prepare(loss, *make_optimizers(trainee.parts(), train))

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss / self.micro_batches)

    def clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.loss.parameters(), self.clip_norm)
        return float(norm)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class FSDP2(Engine):
    """Parameters, gradients and optimizer states in shards (torch's `fully_shard`); gathered for a micro-batch as one group."""

    name = "fsdp2"
    sharded = True

    def __init__(self, loss: Loss, trainee: Trainee, train: Train, share: Share, accelerator: Accelerator) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        super().__init__(loss, trainee)
        device, self.clip_norm, self.micro_batches = accelerator.device, train.clip_norm, len(share.micro_batches)
        offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        fully_shard(loss, mesh=init_device_mesh(device.type, (share.processes,)), offload_policy=policy)
        self.optimizers = list(make_optimizers(trainee.parts(), train))

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.loss.set_requires_gradient_sync(last)  # type: ignore[operator]  # fully_shard adds it
        yield

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.loss.parameters(), self.clip_norm)
        return float(_gathered(norm))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class ZeRO(Engine):
    """DeepSpeed. Its JSON says the stage and what is offloaded; batch sizes, clipping and the optimizer are the recipe's."""

    name = "zero"

    def __init__(self, loss: Loss, trainee: Trainee, train: Train, share: Share, accelerator: Accelerator) -> None:
        super().__init__(loss, trainee)
        deepspeed = _deepspeed(accelerator.device)
        config = deepspeed_config()
        zero = config["zero_optimization"]
        self.stage, self.clip_norm = int(zero["stage"]), train.clip_norm
        self.name, self.sharded = f"zero{self.stage}", self.stage == 3
        config |= {
            "train_batch_size": train.batch_size,
            "train_micro_batch_size_per_gpu": share.rows,
            "gradient_accumulation_steps": len(share.micro_batches),
            "gradient_clipping": train.clip_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**62,
        }
        (optimizer,) = make_optimizers(trainee.parts(), train, fused=False)  # DeepSpeed steps over a few flat tensors
        offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        if offloaded and accelerator.device.type == "cuda":
            optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(optimizer.param_groups, lr=train.lr, betas=(train.betas[0], train.betas[1]))
        self.engine, made, _, _ = deepspeed.initialize(model=loss, optimizer=optimizer, config=config, dist_init_required=False)
        self.model, self.optimizers = self.engine, [made]

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)  # over the number of micro-batches already

    def clip(self) -> float:
        """DeepSpeed clips in its step, which it leaves out if the gradient is not finite; the norm is known after it."""
        self.engine.step()
        if getattr(self.optimizers[0], "overflow", False):
            return float("nan")
        return float(self.engine.get_global_grad_norm())

    def step(self) -> None:
        """Made by `clip`."""

    def model_state(self) -> dict[str, Tensor]:
        if self.stage < 3:
            return super().model_state()
        from deepspeed.utils import safe_get_full_fp32_param

        parameters = dict(self.trainee.module.named_parameters())
        return {
            name: _gathered(safe_get_full_fp32_param(parameters[name]) if name in parameters else tensor.detach())
            for name, tensor in self.trainee.module.state_dict().items()
        }

    def optimizer_state(self) -> OptimizerState:
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = self.optimizers[0].optimizer
        if not inner.state:
            return {}
        step, state = torch.as_tensor(float(next(iter(inner.state.values()))["step"])), {}
        for name, p in self.trainee.module.named_parameters():
            if p.requires_grad:
                moments = {key: _gathered(safe_get_full_optimizer_state(p, key)) for key in ("exp_avg", "exp_avg_sq")}
                state[name] = {"step": step.clone(), **moments}
        return state

    def load_optimizer(self, state: OptimizerState) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not state:
            return
        outer, inner = self.optimizers[0], self.optimizers[0].optimizer
        flats = outer.fp32_partitioned_groups_flat if self.stage == 3 else outer.single_partition_of_fp32_groups
        step = next(iter(state.values()))["step"]
        counted = step.clone() if isinstance(inner, torch.optim.AdamW) else int(step)
        for flat in flats:
            inner.state[flat] = {"step": counted, "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
            counted = step.clone() if isinstance(inner, torch.optim.AdamW) else int(step)
        if self.stage < 3:
            outer._lazy_init_hp_params_optimizer_state()  # else the parameters do not know where in the flat states theirs are
        for name, p in self.trainee.module.named_parameters():
            if name in state:
                for key in ("exp_avg", "exp_avg_sq"):
                    safe_set_full_optimizer_state(p, state[name][key].to(flats[0].device), key)


def _deepspeed(device: torch.device) -> Any:
    try:
        import deepspeed
        import deepspeed.ops.adam
    except ImportError as error:
        raise UserError("deepspeed: wanted by the launch, but it is not installed; pip install 'draftsmith[deepspeed]'") from error
    if device.type == "cpu":
        # It would compile its shared-memory collectives first, for minutes; gloo's serve as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_config() -> dict[str, Any]:
    """The configuration that accelerate was given, as a plain dict; values left to "auto" are DeepSpeed's defaults.

    Raises UserError for parts that are the recipe's to say.
    """
    from accelerate.utils import DeepSpeedPlugin

    config = _without_auto(DeepSpeedPlugin().deepspeed_config)
    for part in ("optimizer", "scheduler"):
        if part in config:
            raise UserError(f"DeepSpeed's configuration: wanted no {part}, as that is the recipe's, got one; take it out")
    for part in ("bf16", "fp16"):
        if config.pop(part, {}).get("enabled"):
            raise UserError(f"DeepSpeed's configuration: wanted no {part}, got it enabled; use train.mixed_precision={part} instead")
    return config


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_auto(value) if isinstance(value, dict) else value for key, value in config.items() if value != "auto"}
    return {key: value for key, value in kept.items() if value is not None}


def configured() -> type[Plain] | type[FSDP2] | type[ZeRO]:
    """The engine that the launcher configured. Raises UserError if it cannot be engaged."""

    def asked(name: str) -> bool:
        return os.environ.get(name, "false").lower() == "true"

    if asked("ACCELERATE_USE_MEGATRON_LM"):
        raise UserError("launch: wanted one process, DDP, FSDP2 or DeepSpeed, got Megatron-LM; use a configuration of recipes/accelerate")
    if not asked("ACCELERATE_USE_FSDP") and not asked("ACCELERATE_USE_DEEPSPEED"):
        return Plain
    engine: type[FSDP2] | type[ZeRO] = FSDP2 if asked("ACCELERATE_USE_FSDP") else ZeRO
    if not torch.distributed.is_initialized():
        name = "FSDP" if engine is FSDP2 else "DeepSpeed"
        raise UserError(
            f"launch: {name} was configured, but this is one process that was not launched as distributed; start it with accelerate launch "
            f"--num_processes N (GPUs), or on a CPU: ACCELERATE_USE_CPU=true ... torchrun --nproc_per_node N -m draftsmith.train RECIPE"
        )
    if engine is FSDP2 and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("launch: wanted fsdp_version: 2, got FSDP 1, which is not supported; see recipes/accelerate/fsdp2.yaml")
    return engine


def make_engine(trainee: Trainee, objective: Objective, train: Train, share: Share, accelerator: Accelerator) -> Engine:
    """The engine that the launcher configured. Raises UserError for settings that it does not have."""
    kind = configured()
    if train.mixed_precision == "fp16" and accelerator.scaler is None and kind is Plain:
        raise UserError(f"train.mixed_precision: wanted no or bf16 on a {accelerator.device.type}, where gradients are not scaled, got fp16")
    if kind is not Plain:
        if train.mixed_precision == "fp16":
            raise UserError(f"train.mixed_precision: wanted no or bf16 under {kind.name}, got fp16")
        if isinstance(trainee, TunedTrainee):
            raise UserError(f"adapter.rank: wanted null under {kind.name}, as the adapter is trained with the drafter; launch with DDP")
    if kind is ZeRO and train.optimizer != "adamw":
        raise UserError(f"train.optimizer: wanted adamw under DeepSpeed, which cuts matrices into flat pieces, got {train.optimizer}")
    if train.activation_checkpointing:
        recompute_activations(trainee, train)
    return kind(Loss(trainee, objective, train, accelerator.device), trainee, train, share, accelerator)
