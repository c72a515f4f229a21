"""Diffusers' denoising loops and autoencoder, small and with random weights."""

import sys
from collections.abc import Callable

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel


@torch.no_grad()
def unet() -> None:
    """Guided by a prompt's embedding."""
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    ).eval()
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(4)
    sample, prompts = torch.randn(1, 4, 16, 16), torch.randn(2, 7, 32)
    for timestep in scheduler.timesteps:
        without, with_prompt = model(torch.cat([sample] * 2), timestep, encoder_hidden_states=prompts).sample.chunk(2)
        sample = scheduler.step(without + 7.5 * (with_prompt - without), timestep, sample).prev_sample


@torch.no_grad()
def dit() -> None:
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8
    ).eval()
    scheduler = DDPMScheduler()
    scheduler.set_timesteps(3)
    sample, labels = torch.randn(2, 4, 8, 8), torch.tensor([1, 2])
    for timestep in scheduler.timesteps:
        noise = model(sample, timestep=timestep.expand(2), class_labels=labels).sample
        sample = scheduler.step(noise, timestep, sample).prev_sample


def vae() -> None:
    """A step of training, then an image encoded and decoded."""
    model = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.rand(2, 3, 32, 32)
    posterior = model.encode(images).latent_dist
    loss = torch.nn.functional.mse_loss(model.decode(posterior.sample()).sample, images) + posterior.kl().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.eval()(images).sample.clamp(-1, 1)


PROGRAMS: dict[str, Callable[[], None]] = {program.__name__: program for program in (unet, dit, vae)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
