"""ACT, the action chunking transformer (Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost
Hardware", section IV and figure 4).

This is the decoder of the paper's conditional VAE, whose style variable z is zero at test time: an encoder over tokens
of z, the joints and the pixels of the cameras' feature maps, and a decoder whose queries are the steps of the chunk.
The VAE's own encoder, which only training needs, is not implemented. Parameters have the names of LeRobot's
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@dataclass(frozen=True, slots=True)
class ActSizes:
    """The sizes of an ActNetwork.

    Attributes:
        action: the size of an action; `chunk`: the number of actions in a chunk.
        state, environment: the sizes of the robot's state and of the environment's, if it is observed; 0: none.
        width, heads, feedforward: sizes of the transformer's layers.
        encoder_layers, decoder_layers: numbers of layers.
        latent: the size of z.
        pre_norm: whether layers normalise before attention (Xiong et al. 2020); those of the paper do not.
        activation: "relu" or "gelu".
        dropout: dropout probability in training.
    """

    action: int
    chunk: int
    state: int = 0
    environment: int = 0
    width: int = 512
    heads: int = 8
    feedforward: int = 3200
    encoder_layers: int = 4
    decoder_layers: int = 1
    latent: int = 32
    pre_norm: bool = False
    activation: str = "relu"
    dropout: float = 0.1


class ActNetwork(nn.Module):
    """The transformer. Its inputs and outputs are normalised.

    Args:
        sizes: its sizes.
        backbone: computes feature maps (n, channels, h, w) from images (n, 3, H, W); None: there are no cameras.
        channels: channels of the feature maps.

    Example:
        net = ActNetwork(ActSizes(action=7, chunk=50, state=7, width=64, feedforward=128), resnet("resnet18"), 512)
        chunk = net(state=state, images=[top, wrist])  # (n, 50, 7)
    """

    def __init__(self, sizes: ActSizes, backbone: nn.Module | None = None, channels: int = 512) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        if backbone is not None:
            self.backbone = backbone
            self.encoder_img_feat_input_proj = nn.Conv2d(channels, width, 1)
        self.encoder_latent_input_proj = nn.Linear(sizes.latent, width)
        if sizes.state:
            self.encoder_robot_state_input_proj = nn.Linear(sizes.state, width)
        if sizes.environment:
            self.encoder_env_state_input_proj = nn.Linear(sizes.environment, width)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + bool(sizes.state) + bool(sizes.environment), width)
        self.encoder = _Encoder(sizes)
        self.decoder = _Decoder(sizes)
        self.decoder_pos_embed = nn.Embedding(sizes.chunk, width)
        self.action_head = nn.Linear(width, sizes.action)
        for matrix in (*self.encoder.parameters(), *self.decoder.parameters()):
            if matrix.dim() > 1:
                nn.init.xavier_uniform_(matrix)

    def forward(
        self, state: Tensor | None = None, environment: Tensor | None = None, images: Sequence[Tensor] = ()
    ) -> Tensor:
        """Compute chunks (n, chunk, action) from states (n, state), environment states and images (n, 3, H, W)."""
        given = next(value for value in (state, environment, *images) if value is not None)
        n = given.shape[0]
        tokens = [self.encoder_latent_input_proj(given.new_zeros(n, self.sizes.latent))]  # z = 0: the prior's mean
        if state is not None:
            tokens.append(self.encoder_robot_state_input_proj(state))
        if environment is not None:
            tokens.append(self.encoder_env_state_input_proj(environment))
        seen = [torch.stack(tokens, dim=1)]
        places = [self.encoder_1d_feature_pos_embed.weight[None]]
        for image in images:
            features = self.encoder_img_feat_input_proj(self.backbone(image))
            seen.append(features.flatten(2).transpose(1, 2))
            places.append(_places(features.shape[2], features.shape[3], self.sizes.width, features))
        where = torch.cat(places, dim=1)
        memory = self.encoder(torch.cat(seen, dim=1), where)
        queries = self.decoder_pos_embed.weight[None]
        steps: Tensor = self.decoder(memory.new_zeros(n, *queries.shape[1:]), memory, queries, where)
        chunk: Tensor = self.action_head(steps)
        return chunk


class _Layer(nn.Module):
    """The common part of encoder and decoder layers: attention and a perceptron, each with skip and normalisation."""

    def __init__(self, sizes: ActSizes, norms: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(sizes.width, sizes.heads, sizes.dropout, batch_first=True)
        self.linear1 = nn.Linear(sizes.width, sizes.feedforward)
        self.linear2 = nn.Linear(sizes.feedforward, sizes.width)
        for number in range(1, norms + 1):
            self.add_module(f"norm{number}", nn.LayerNorm(sizes.width))
        self._pre_norm, self._activation = sizes.pre_norm, _ACTIVATIONS[sizes.activation]
        self._dropout = nn.Dropout(sizes.dropout)

    def before(self, number: int, x: Tensor) -> Tensor:
        """Return the input of a block."""
        normalised: Tensor = self.get_submodule(f"norm{number}")(x) if self._pre_norm else x
        return normalised

    def after(self, number: int, x: Tensor, block: Tensor) -> Tensor:
        """Add a block's output to its input, and normalise if that follows the block."""
        x = x + self._dropout(block)
        return x if self._pre_norm else self.get_submodule(f"norm{number}")(x)

    def perceptron(self, x: Tensor) -> Tensor:
        """Compute the perceptron block."""
        hidden: Tensor = self.linear2(self._dropout(self._activation(self.linear1(x))))
        return hidden


class _EncoderLayer(_Layer):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__(sizes, norms=2)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        given = self.before(1, x)
        asked = given + where
        x = self.after(1, x, self.self_attn(asked, asked, given, need_weights=False)[0])
        return self.after(2, x, self.perceptron(self.before(2, x)))


class _DecoderLayer(_Layer):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__(sizes, norms=3)
        self.multihead_attn = nn.MultiheadAttention(sizes.width, sizes.heads, sizes.dropout, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, queries: Tensor, where: Tensor) -> Tensor:
        given = self.before(1, x)
        asked = given + queries
        x = self.after(1, x, self.self_attn(asked, asked, given, need_weights=False)[0])
        given = self.before(2, x)
        x = self.after(2, x, self.multihead_attn(given + queries, memory + where, memory, need_weights=False)[0])
        return self.after(3, x, self.perceptron(self.before(3, x)))


class _Encoder(nn.Module):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_EncoderLayer(sizes) for _ in range(sizes.encoder_layers))
        self.norm = nn.LayerNorm(sizes.width) if sizes.pre_norm else nn.Identity()

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, where)
        encoded: Tensor = self.norm(x)
        return encoded


class _Decoder(nn.Module):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DecoderLayer(sizes) for _ in range(sizes.decoder_layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor, memory: Tensor, queries: Tensor, where: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, queries, where)
        decoded: Tensor = self.norm(x)
        return decoded


def _places(height: int, width: int, channels: int, like: Tensor) -> Tensor:
    """Return sinusoidal position embeddings of a feature map, (1, height * width, channels), as in DETR.

    Rows are in the first half of the channels and columns in the second, each from just above 0 to 2 pi (Carion et al.
    2020).
    """
    half = channels // 2
    places = []
    for count in (height, width):
        at = torch.arange(1, count + 1, dtype=torch.float32, device=like.device)
        at = at / (count + 1e-6) * (2 * math.pi)
        pairs = torch.div(torch.arange(half, device=like.device), 2, rounding_mode="floor")
        angles = at[:, None] / 10000 ** (2 * pairs.float() / half)
        waves = torch.stack((angles[:, 0::2].sin(), angles[:, 1::2].cos()), dim=-1).flatten(1)
        places.append(waves)
    rows = places[0][:, None].expand(height, width, half)
    columns = places[1][None].expand(height, width, half)
    return torch.cat((rows, columns), dim=-1).reshape(1, height * width, channels).to(like.dtype)


# ----
# The cameras' backbone: a residual network (He et al. 2015) up to its last feature map, with frozen batch
# normalisation.


class _FrozenNorm(nn.Module):
    """Batch normalisation with fixed statistics."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class _Block(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.bn1 = _FrozenNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = _FrozenNorm(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != channels:
            self.downsample = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), _FrozenNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Resnet(nn.Module):
    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = _FrozenNorm(64)
        before = 64
        for number, (count, channels) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), 1):
            strides = (1 if number == 1 else 2, *[1] * (count - 1))
            layers = [_Block(before if at == 0 else channels, channels, stride) for at, stride in enumerate(strides)]
            self.add_module(f"layer{number}", nn.Sequential(*layers))
            before = channels

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return x


def resnet(name: str) -> nn.Module:
    """Create a backbone with 512 channels: "resnet18" or "resnet34". Raises ValueError for another name."""
    if name not in _BLOCKS:
        raise ValueError(f"a backbone {name[:80]!r}: expected one of {', '.join(_BLOCKS)}")
    return _Resnet(_BLOCKS[name])
