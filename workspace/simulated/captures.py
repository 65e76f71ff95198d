"""The rules of stream capture: what begins and ends one, and what CUDA refuses while one is open.

A refused call raises and invalidates the captures it touches, as on CUDA ("When an invalid operation is
attempted during stream capture, any associated capture graphs are invalidated", CUDA programming guide,
prohibited and unhandled operations). The invalid capture must still be ended on its origin, which raises once
more.
"""

from __future__ import annotations

import threading
from typing import NoReturn

from workspace.errors import CaptureBroken, CaptureError
from workspace.simulated.capture import Capture, Mode
from workspace.simulated.events import Event
from workspace.simulated.streams import DEFAULT, StreamState, StreamTable

ISOLATION = "cudaErrorStreamCaptureIsolation"
UNSUPPORTED = "cudaErrorStreamCaptureUnsupported"


class Captures(dict[int, Capture]):
    """Captures in progress on one device, by number. Called with the device's lock held."""

    def __init__(self, streams: StreamTable) -> None:
        super().__init__()
        self._streams = streams
        self._next = 1
        self.relaxed = Relaxed()

    def begin(self, state: StreamState, mode: Mode, log: bool) -> Capture:
        """A capture that begins on a stream."""
        if state.key == DEFAULT:
            raise CaptureError(
                f"the default stream cannot be captured ({UNSUPPORTED})",
                "begin the capture on another stream",
            )
        if state.capture is not None:
            raise CaptureError(
                f"stream {state.key} ({state.name}) is already part of capture {state.capture.id}"
                " (cudaErrorIllegalState)",
                "end that capture first",
                stream=state.key,
                capture=state.capture.id,
            )
        capture = Capture(self._next, state.key, mode, threading.get_ident(), log)
        self._next += 1
        self[capture.id] = state.capture = capture
        return capture

    def end(self, state: StreamState) -> Capture:
        """End the capture that began on a stream; raises `CaptureBroken` if it is not valid."""
        capture = state.capture
        if capture is None or capture.origin != state.key:
            raise CaptureError(
                f"no capture began on stream {state.key} ({state.name}) (cudaErrorStreamCaptureUnmatched)",
                "end a capture on the stream it began on",
                stream=state.key,
            )
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            raise CaptureError(
                f"capture {capture.id} began in another thread (cudaErrorStreamCaptureWrongThread)",
                "end it in the thread that began it, or begin it in relaxed mode",
                capture=capture.id,
            )
        stray = capture.unjoined()
        if stray and not capture.broken:
            names = ", ".join(f"{key} ({self._streams.name_of(key)})" for key in stray)
            capture.broken = f"stream {names} was not joined (cudaErrorStreamCaptureUnjoined)"
        self.close(capture)
        if capture.broken:
            raise CaptureBroken(
                f"capture {capture.id} is invalid: {capture.broken}",
                "nothing was kept; remove what broke it, join every forked stream, and capture again",
                capture=capture.id,
            )
        return capture

    def close(self, capture: Capture) -> None:
        """The streams of a capture are ordinary streams again."""
        capture.open = False
        del self[capture.id]
        for state in self._streams.values():
            if state.capture is capture:
                state.capture = None

    def valid(self, capture: Capture, stream: int) -> Capture:
        """The capture, if nothing has broken it."""
        if capture.broken:
            raise CaptureBroken(
                f"capture {capture.id} is invalid: {capture.broken} (cudaErrorStreamCaptureInvalidated)",
                "end it; nothing more can be captured",
                capture=capture.id,
                stream=stream,
            )
        return capture

    def wait(self, state: StreamState, event: Event) -> None:
        """A wait that touches a capture: the stream is part of one, or the event was recorded in one."""
        mine, theirs = state.capture, event.capture
        if mine is not None:
            self.valid(mine, state.key)
        if theirs is None:
            assert mine is not None
            if event.stamp is not None:
                self.broken(
                    f"stream {state.key} waited for an event that was recorded outside ({ISOLATION})",
                    "order the graph's launch instead, or record the event inside the capture",
                    mine,
                )
            return
        if not theirs.open:
            self.broken(
                f"stream {state.key} waited for an event of capture {theirs.id}, which is over ({ISOLATION})",
                "record the event again outside, after the graph's launch",
                *([mine] if mine is not None else []),
            )
        if mine is not None and mine is not theirs:
            self.broken(
                f"stream {state.key} of capture {mine.id} waited for an event of capture {theirs.id}"
                " (cudaErrorStreamCaptureMerge)",
                "two captures cannot be joined; capture both parts on streams of one",
                mine,
                theirs,
            )
        state.capture = self.valid(theirs, state.key)
        theirs.wait(event, state.key)

    def refuse_captured(self, event: Event, verb: str) -> None:
        """Events recorded in a capture have no status and cannot be waited for by the host."""
        capture = event.capture
        if capture is not None:
            self.broken(
                f"{verb} of an event recorded in capture {capture.id} (cudaErrorCapturedEvent)",
                "record it again outside the capture",
                *([capture] if capture.open else []),
            )

    def refuse_unsafe(self, verb: str) -> None:
        """Calls that a global capture forbids to every thread, and a thread-local one to its own."""
        if not self or self.relaxed.active():
            return
        me = threading.get_ident()
        hit = [c for c in self.values() if c.mode == "global" or (c.mode == "thread_local" and c.thread == me)]
        if hit:
            self.broken(
                f"{verb} while capture {', '.join(str(c.id) for c in hit)} is in progress ({UNSUPPORTED})",
                "make the call before or after the capture, or under device.relaxed()",
                *hit,
            )

    def refuse_stream(self, state: StreamState, verb: str) -> None:
        """Calls that may not touch a stream while it is part of a capture."""
        if state.capture is not None:
            self.broken(
                f"{verb} of stream {state.key} ({state.name}), which is part of capture {state.capture.id}"
                f" ({UNSUPPORTED})",
                "make the call before or after the capture",
                state.capture,
            )

    def refuse_device(self, verb: str) -> None:
        """Calls that cover every stream, while any is capturing."""
        if self:
            self.broken(
                f"{verb} while a stream is capturing ({UNSUPPORTED})",
                "make the call before or after the capture",
                *self.values(),
            )

    def refuse_legacy(self) -> None:
        """Work on the default stream would join blocking streams, and they are capturing."""
        hit = [state.capture for state in self._streams.blocking if state.capture is not None]
        if hit:
            self.broken(
                "work on the default stream while one is capturing (cudaErrorStreamCaptureImplicit)",
                "use a stream of your own, or capture on streams made non-blocking",
                *hit,
            )

    def broken(self, problem: str, remedy: str, *captures: Capture) -> NoReturn:
        """Invalidate captures and raise; without any, the call is refused and nothing else changes."""
        for capture in captures:
            capture.broken = capture.broken or problem
        kind = CaptureBroken if captures else CaptureError
        raise kind(problem, remedy, captures=[capture.id for capture in captures])


class Relaxed(threading.local):
    """In it, this thread's calls break no capture of another (``cuThreadExchangeStreamCaptureMode``); may nest."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def active(self) -> bool:
        return self.depth > 0
