"""What a TD3 learner can be told; apart from it, so that who only acts never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

CLIP = 5.0  # deviations; beyond them an observation tells no more


@dataclass(frozen=True, slots=True)
class TD3Settings:
    """What the learner can be told.

    Attributes:
        hidden_actor, hidden_critic: units of the layers.
        actor_rate, critic_rate: learning rates of Adam.
        tau: how far target networks move towards the others in a step.
        policy_delay: critic steps for each step of actor and targets.
        target_noise, target_clip: deviation and bound of the noise on target actions (smoothing).
        pre_tanh_penalty: weight of the squared size, beyond 1, of what enters the actor's last tanh; keeps actions
            from being stuck at their bounds, where they have no gradient. 0 is plain TD3.
        reward_scale: rewards are multiplied by it.
    """

    hidden_actor: tuple[int, ...] = (128, 128)
    hidden_critic: tuple[int, ...] = (128, 128)
    actor_rate: float = 5e-4
    critic_rate: float = 1e-3
    tau: float = 0.005
    policy_delay: int = 2
    target_noise: float = 0.2
    target_clip: float = 0.5
    pre_tanh_penalty: float = 0.001
    reward_scale: float = 0.1
