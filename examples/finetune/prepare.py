"""Texts as token ids, of which the last tenth is held out: python prepare.py MODEL TEXT ... -o FOLDER"""

import argparse
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a tokenizer")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for text in args.texts:
        ids += tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"] + end
    tokens, held_out = np.array(ids, dtype=np.uint32), max(1, len(ids) // 10)
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "train.npy", tokens[:-held_out])
    np.save(args.out / "val.npy", tokens[-held_out:])
    print(f"{len(tokens)} tokens in {args.out}, of which {held_out} are held out")


if __name__ == "__main__":
    main()
