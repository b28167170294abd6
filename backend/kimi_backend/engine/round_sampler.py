"""The times of some rounds of a request that asked for them: bounded, and evenly spread however long it runs."""

from kimi_backend.engine.commit import StepOutput
from kimi_backend.types.request import RoundTime


class RoundSampler:
    """Keeps each round until it has as many as it may, then every second, then every fourth."""

    def __init__(self, most: int, arrival_s: float) -> None:
        self.kept: list[RoundTime] = []
        self._most = most
        self._arrival_s = arrival_s
        self._stride = 1
        self._num_rounds = 0
        self._since_s = 0.0

    def add(self, output: StepOutput, *, is_round: bool) -> None:
        """Take a step's output, in order.

        Args:
            is_round: False for the step that drew the first token, which begins the first round.
        """
        since_s, self._since_s = self._since_s, output.time_s - self._arrival_s
        if not is_round:
            return
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        if len(self.kept) == self._most and number % self._stride == 0:
            del self.kept[1::2]
            self._stride *= 2
        if number % self._stride == 0 and len(self.kept) < self._most:
            round_time = RoundTime(number, since_s, self._since_s, output.num_draft_tokens, output.num_accepted)
            self.kept.append(round_time)
