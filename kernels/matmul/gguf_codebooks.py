"""Codebooks of GGUF's types IQ1, IQ2 and IQ3, in which values are looked up as vectors.

A codebook is a set of vectors of eight values out of three, or of four values out of eight. Read as
the digits of a number, the least significant first, vectors are sorted by that number. So one bit
for each of the 3**8 or 8**4 possible vectors describes the set; those bits are stored here,
compressed. The sets are part of the format (``iq*_grid`` in ggml-common.h of
https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import zlib
from base64 import b64decode
from typing import NamedTuple

import torch

from vllm_module.kernels.once import Once


class Codebook(NamedTuple):
    """The possible values, the length of a vector, and a bit for each possible vector."""

    values: tuple[int, ...]
    width: int
    bits: bytes


def codebook(name: str, device: torch.device) -> torch.Tensor:
    """Return the vectors of a codebook in their order, float32 ``[vectors, width]``."""
    return _unpacked(name, device)


# The mark of torch.compiler.assume_constant_result, which imports all of torch's compiler.
vars(codebook)["_dynamo_marked_constant"] = True


@Once
def _unpacked(name: str, device: torch.device) -> torch.Tensor:
    values, width, packed = CODEBOOKS[name]
    with torch.device("cpu"):
        bits = torch.frombuffer(bytearray(zlib.decompress(b64decode(packed))), dtype=torch.uint8)
        members = ((bits[:, None] >> torch.arange(8)) & 1).flatten().nonzero()
        digits = members // len(values) ** torch.arange(width) % len(values)
        return torch.tensor(values, dtype=torch.float32)[digits].to(device)


CODEBOOKS = {
    "IQ1_S": Codebook(
        (-1, 0, 1), 8,
        b"eNotUkFLnEcYfneq4XVMZWM/QXJ696ux01kR6y3pZZFdWPRiQvIHPNm0SMk5TT4nu+mX2RRCILQ0l3EwyTgNq/FQtp+w"
        b"AU9WemjprQdpPYS6HgJeGgzEzK69zbzwvM/zvM9z7UJUN2zmMlY+c3dJ2/MoKarPR4rKlQsj/YYpSkcBlflAmnTL8wd+"
        b"EGLg/r4yWAqoQprMRwGup/AHg4kMk6hO1ZlrWMlNbBvS4yDHnLe4v44oBAQu4QW5hPhj/CVztNu8Z5v+0s3DTralhlpx"
        b"tvvn0EMWQ0xOZ1wxBDn7t/08pqKF5dKy1wLjXFA4omigUrhaN8g+dpeopuhqkGEJH81HTGLLqcRUGaGyi5aJnyTWw3sK"
        b"KyXoKjQwcxkquU8VaCVxZSrqD5bFqXjGyEug4Re6KVy24t3XoDgyEbMaKKgmprMh/TY1srjz17NGY8k9DP8bDV0+K6la"
        b"Kwkt0dPObza26z+afx0DBtKlQIlpWCsyk6hpnrVb2btDa4oWNRcdCyvT7OzxamfvddFNfte+dXj83+2Xr77J9r54+8nJ"
        b"y/Hj4YN/dJz37aGax003qJon2djBnaRvYWLxyPHVIgTLuO+HgSnJn9Kv6t4DJcDC/eQjUIjwlfZ+iz1ta7PLki+/n/x9"
        b"8yCv8pN+T4z88aQPePcOhLkVUv5iFk/XzEAyCtousOWoHA5VeK56KXsS/ls+3Eu532C3NjlipmRjSAEtXtdLLe8TIK72"
        b"d+IClruoAU0joVF3OXopE+BdVMFBb+E+pYqPhgi89XqjwbgMFCrxXKCAtZTFpj0oWqizuc1gefVN09MVsfizmXqVcBaa"
        b"cH0hFIl5X/Qdu2YsYp6MjkENnabMexVdOwOznuETyH9Y/j/l/lBp9fyIACBw8Yw6loGqDoiDCM7NVbrdcKynMB3DVPAS"
        b"hkmwzLoLc+8B4wUZaQ==",
    ),
    "IQ2_XXS": Codebook(
        (8, 25, 43), 8,
        b"eNp1UkuqxDAMk8Hdq5B3Hwd6gG7m/ld5tvPt0BENpLHkSG4/f+XDq1ZouUAAaigwxA64afWEFLXbz718+LoBQVCqn5eS"
        b"xPakiugoSjpNT6j4xkLlkEakmrdsKvaVVzQcEqXwcY6jlFtvHa9ytE5NdA8erHrVBlu7ptfiaQ4UTzR7t0+D9Mhgk18I"
        b"792/MWkMozOpYEUGZTWnjKHk4pUeVVKiD+3yaLJ11MlR6vJsezlRkya9ZIuWJs+Vsrxm3zJ8I6bZP4XaFM4G+dvYCpk3"
        b"5szlEWu/YcUTjjHsvjFmaK+qB/ijNp18T/Nl/wr9TfsHxl0VIw==",
    ),
    "IQ2_XS": Codebook(
        (8, 25, 43), 8,
        b"eNpdUVuuhTAIHBL6j4nuhyb2vyZ2/1s5PFr13uYcxQLDzDDGuEarR6N7jN6qFMJ9iVYGEbqnDtoZlkIhZkArpNjLfqNs"
        b"O5NA1bo8JYAFBDtigJd16QK0VEffvNELHLCRJGDcOCavsBSwVdr3Ft8MzBI/YyQguItPFR+YrVZ4Vig91ZxJmsCQSjFF"
        b"FqbnQF6FMyWHrikZp8mrtADNKEt5SwnyPsOM0miHp4hoTq0xX7HOtDckM8rDMHs17BW3p+aFYCbtz+aGBpShy2TzehJu"
        b"iNPq30xqNOkvCWeIZyg+If0x2t8iIbnQwY7bDyOfokOFu1z32/oVuavEmHEw5Vjp7gI+vAKcOd2IzVCwoLfAQE4LqnxJ"
        b"7h+iL1v+XMoqbTQn0uOl7msKr70o/h/N4W2uYLIu79Po/gBOsClJ",
    ),
    "IQ2_S": Codebook(
        (8, 25, 43), 8,
        b"eNptUl2KBiEMa0HfK+h9KozvCvb+V9m0OrvfsivD/MXEJGpmy4a1XPAyh9Xc6l4yLVEpeAwza3usaVZxAVJAq6YppM2c"
        b"JcyaLT2AlIirZCEipW1rQbmtui2WsEqz9p4y1US+1ivoUAjWzIBAV1vJISY6EP4lcShBm/Zqq+fEhfbsmg9LaCXMz/Qg"
        b"xS/BAkpmUINcYMOXIGrxTSGOT9yYpnu1Vh9vI1+HvSWP7L7MthfV6UCzvw4hIPVAsBEstKF0IB8QbMGiP5Er4HetD0G6"
        b"5iMyICUE/BGMWiLJM1qGQ/VNuR2K20hOIF6fghIY3ex4n3JL4FPLO2KGahul7iKdaRzznbS0y8IuF4+cfyKzQ/OKg5U5"
        b"ZHDnVx3K2c/KMLms2JRQPAfAKf90WOQ7NiDh02sg9DEwGad3h46fCTlhJKkX/TCtK8h6O/yVGdg1ylcNv5Ur35q+ALm8"
        b"Vh4=",
    ),
    "IQ3_XXS": Codebook(
        (4, 12, 20, 28, 36, 44, 52, 62), 4,
        b"eNpNUTEOwjAMPFuxVGUKQ/eKCfGKdGCHH0WdEK9g5Jn4nKZwVdUmPt+dk/llmoBLtrNpgcxqL2xYNlvgEExopeGyAckf"
        b"wgsFeMBLimx5bgKYWhSzqa+QDKIVFeeu4jj5ChqqgRTblm/0xzX6nmKbNXGSntCb6DfRq7kbjTtyjSBQy66/hN+d+2xm"
        b"UmVXQJrvrAzPhsIYUZoYzGd743mEKqQLVncbdJqUEUMGcbH932U9l6yoo4HjpLQ7QEI8ddpIhIPI7z1ctL8Nw3X9CxXS"
        b"e8Mevst9ZNxL7bIcM/FIRlwNpv2O7piB+AIWuhT2",
    ),
    "IQ3_S": Codebook(
        (1, 3, 5, 7, 9, 11, 13, 15), 4,
        b"eNotUcFKw0AQfTPMwmZPuyHiNd1GqPmKrdSDeimC+DtpqdD2luIHiFYE+5PObpzDwLw3897b5Od1br+dOV3PD9EjytdD"
        b"DGeHykbz6M0QaV9LxaAG9/YTySYHhoCvdEYAri/mGWuWp8AVGyzpHKRqSU7VNugiLRq4le4VlqE1Yq3dGW4zf3k5mt4M"
        b"t+bQ1aL8CW7De9Q33DihhC2qTuHOswxkQW9ZRC9bTmQJkF/p39ly7x0ItCLRqIpzONKxhbV3qioBbFrxCRYJJYaDaXOa"
        b"IKOwHu6czGxUfMaWBiHvTMy8gR+y3Ee5EqiCRzaYgaxCEgSjJN8LS14gtkvdwY4GeG5tDZKUhXJ3KJUXm9K1+oxqAGx0"
        b"8Jn00gqR5+yipY9QsMLkm0MX/F9rhEnkBcIeC53rpb6Gi0eXc8T8kWhylcm7/IVJG/gDusYnIA==",
    ),
}  # fmt: skip
