"""Torchaudio's models behind its features."""

import sys
from collections.abc import Callable

import torch
from torchaudio.models import Conformer, wav2vec2_model
from torchaudio.transforms import MelSpectrogram, Resample


def conformer() -> None:
    """Trained on mel features with CTC."""
    features = MelSpectrogram(n_mels=32, n_fft=256)
    model = Conformer(input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=7)
    head = torch.nn.Linear(32, 11)
    mels = features(torch.randn(2, 4000)).transpose(1, 2)
    frames, lengths = model(mels, torch.tensor([mels.shape[1], 20]))
    scores = head(frames).log_softmax(-1).transpose(0, 1)
    torch.nn.functional.ctc_loss(scores, torch.randint(1, 11, (2, 5)), lengths, torch.tensor([5, 3])).backward()


def wav2vec2() -> None:
    model = wav2vec2_model(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2), (16, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=16,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=29,
    ).eval()
    with torch.inference_mode():
        emissions, _ = model(Resample(8000, 16000)(torch.randn(1, 2000)))
        emissions.argmax(-1).unique_consecutive()


PROGRAMS: dict[str, Callable[[], None]] = {program.__name__: program for program in (conformer, wav2vec2)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
