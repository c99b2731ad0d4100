"""A server's engine in a few lines: requests come and go, one batch decodes them all.

    python examples/engine_batch.py

Each request has parameters, a seed and stops of its own, and the tokens that it would
have alone. With several threads use ``mlx_mtp.Scheduler``, which has the same options.
"""

from mlx_mtp import BatchIterator, SamplingParams


class Engine:
    """Texts of many requests, streamed.

    Args:
        decoder (SpeculativeDecoder): Of the model.
        tokenizer: With ``eos_token_ids`` and ``detokenizer``, as ``mlx_lm`` has it.
    """

    def __init__(self, decoder, tokenizer, rows=8):
        self.batch = BatchIterator(decoder, max_rows=rows)
        self.tokenizer, self.texts = tokenizer, {}

    def ask(self, prompt, **options):
        """Queues a request between two turns; its id."""
        ends = self.tokenizer.eos_token_ids
        id_ = self.batch.add(prompt, stop_tokens=ends, **options)
        self.texts[id_] = self.tokenizer.detokenizer  # a new one each time
        return id_

    def turn(self):
        """New text and whether it was the last, by id; nothing when all is done."""
        for out in next(self.batch, ()):
            text = self.texts[out.id]
            for step in out.steps:
                if step.token not in self.tokenizer.eos_token_ids:
                    text.add_token(step.token)
            if out.finish:
                text.finalize()
                del self.texts[out.id]
            yield out.id, text.last_segment, out.error or out.finish

    def cancel(self, id_):
        self.batch.remove(id_)
        self.texts.pop(id_, None)


if __name__ == "__main__":
    import mlx_mtp

    model, tokenizer = mlx_mtp.load("demo")
    target = mlx_mtp.as_target(model)
    drafter = mlx_mtp.MTPHeadDrafter(model.mtp_head.head, target)
    engine = Engine(mlx_mtp.SpeculativeDecoder(target, drafter, depth=3), tokenizer)
    lines = {}
    for n in (5, 57, 570):
        asked = [{"role": "user", "content": f"What is {n} + 68?"}]
        prompt = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=False
        )
        params = SamplingParams(temperature=0.7, top_p=0.95)
        lines[engine.ask(prompt, params=params, seed=n, max_tokens=200)] = ""
    while engine.texts:
        for id_, text, end in engine.turn():
            lines[id_] += text
            if end:
                print(f"{id_} ({end}): {lines[id_]}")
