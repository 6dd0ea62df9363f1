"""Streams between ranks: which callers may open one, and what one rank can do to another through it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc
import pytest
import torch

from shardnet.errors import CollectiveError, CollectiveMismatch, PeerLost, ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.hello import Hello, disagreement, terms_of
from shardnet.wire import Chunk, encode
from tests.promises import within_s
from tests.shared_loop import on_shared_loop
from tests.transport.puppet import Theatre, theatre

INVALID, REFUSED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


class TestHello:
    @pytest.mark.parametrize("job", ["default", "Sprachmodell für 日本", "100%", "a b\tc", "-bin"])
    def test_any_name_of_a_job_arrives(self, job: str) -> None:
        hello = Hello(job, 3, 1, 0, "abc-123", "a 1, b 2")
        assert all(value.isascii() and value.isprintable() for _, value in hello.metadata())
        assert Hello.read([("user-agent", "grpc"), *hello.metadata()]) == hello

    @pytest.mark.parametrize(
        "metadata",
        [
            (),
            (("user-agent", "curl"),),
            (("shardnet-job", "x"), ("shardnet-epoch", "1")),
            (*Hello("x", 1, 1, 0, "i", "").metadata()[:4], ("shardnet-incarnation", b"\xff")),
            (*Hello("x", 1, 1, 0, "i", "").metadata()[1:], ("shardnet-job", "%ff")),
            (*Hello("x", 1, 1, 0, "i", "").metadata(), ("shardnet-epoch", "one")),
            Hello("x", 1, 1, 0, "i", "a 1\n[rank 0/2 epoch 1] all is well").metadata(),
            Hello("x", 1, 1, 0, "i", "\x1b]0;title\x07").metadata(),
            Hello("x", 1, 1, 0, "i\n", "").metadata(),
            (*Hello("x", 1, 1, 0, "i", "").metadata(), ("shardnet-source", "9" * 5000)),
        ],
    )
    def test_what_is_none_is_refused(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        with pytest.raises(ProtocolError, match="not a worker's"):
            Hello.read(metadata)

    @pytest.mark.parametrize(
        ("theirs", "text"),
        [
            ({"b": 2, "a": 1}, None),
            ({"a": 1, "b": 22}, "the caller has b 22, this rank has b 2"),
            ({"a": 1}, "the caller has no such setting, this rank has b 2"),
            ({"a": 1, "b": 2, "c": 3}, "the caller has c 3, this rank has no such setting"),
        ],
    )
    def test_settings_are_compared_one_by_one(self, theirs: dict[str, object], text: str | None) -> None:
        assert disagreement(terms_of(theirs), terms_of({"a": 1, "b": 2})) == text


class TestStrangers:
    """They are refused with a reason before a single chunk is read; the mesh is not disturbed."""

    @on_shared_loop
    async def test_without_metadata(self) -> None:
        async with theatre() as stage:
            assert await stage.open(None).refusal() == (
                *(INVALID,),
                "the caller's metadata is not a worker's; only shardnet workers may call this service",
            )
            await still_works(stage)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda h: replace(h, job="other"), "this worker belongs to job 'puppet theatre', the caller to 'other'"),
            (lambda h: replace(h, epoch=0), "this worker is rank 0 of epoch 1, the caller wants rank 0 of epoch 0"),
            (lambda h: replace(h, target=1), "this worker is rank 0 of epoch 1, the caller wants rank 1 of epoch 1"),
            (lambda h: replace(h, source=0), "the caller says that it is rank 0, but it is not the worker that has this rank"),
            (lambda h: replace(h, source=-1), "the caller says that it is rank -1, but it is not the worker that has this rank"),
            (lambda h: replace(h, source=7), "the caller says that it is rank 7, but it is not the worker that has this rank"),
            (lambda h: replace(h, incarnation="older"), "the caller says that it is rank 1, but it is not the worker that has this rank"),
            (
                lambda h: replace(h, terms=h.terms.replace("chunk_bytes 64,", "chunk_bytes 128,")),
                "the settings of rank 1 and rank 0 differ, but must be the same on all ranks: the caller has chunk_bytes 128, "
                "this rank has chunk_bytes 64",
            ),
            (lambda h: h, "rank 1 already has an open stream to this rank"),
        ],
        ids=["job", "epoch", "target", "itself", "negative", "too large", "incarnation", "terms", "twice"],
    )
    def test_with_wrong_metadata(self, change: Callable[[Hello], Hello], text: str, caplog: pytest.LogCaptureFixture) -> None:
        @on_shared_loop
        async def run() -> None:
            async with theatre() as stage:
                assert await stage.open(change(stage.hello)).refusal() == (REFUSED, text)
                await still_works(stage)

        with caplog.at_level(logging.WARNING):
            run()
        assert [record.message for record in caplog.records if "refused a stream" in record.message] != []

    @on_shared_loop
    async def test_many_at_once_get_one_place(self) -> None:
        """Two streams of one rank that are opened in the same moment: the check and the entry are one step."""
        async with theatre() as stage:
            stage.mesh._inbound.pop(1, None)  # as if rank 1 had not called yet
            streams = [stage.open(stage.hello) for _ in range(10)]
            outcomes = [await stream.accepted() for stream in streams]
            assert outcomes.count(True) == 1

    @on_shared_loop
    async def test_of_an_epoch_that_does_not_come(self) -> None:
        """A peer may know of the next epoch first, so it is kept waiting for a while."""
        async with theatre() as stage:
            stage.service._wait_s = 0.1
            code, text = await stage.open(replace(stage.hello, epoch=2)).refusal()
            assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "this worker has not joined epoch 2")


async def still_works(stage: Theatre) -> None:
    """Rank 0 and the puppet complete a barrier."""
    handle = stage.backend.barrier()
    await stage.announce_like(await stage.heard.get())
    await handle


class TestFrames:
    """Frames that should not come over an accepted stream. Nobody computes with them, and waiting callers are told."""

    @pytest.mark.parametrize("frame", [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 5000])
    def test_garbage(self, frame: bytes) -> None:
        @on_shared_loop
        async def run() -> None:
            async with theatre() as stage:
                handle = stage.backend.all_reduce(torch.ones(4))
                await stage.send_bytes(frame)
                with pytest.raises(
                    PeerLost, match=r"rank 1 \(127.0.0.1:\d+\) lost during all_reduce #0: .*(not a valid chunk|checksum)"
                ) as caught:
                    await handle
                assert caught.value.rank == 1
                assert (await stage.stream.refusal())[0] is grpc.StatusCode.DATA_LOSS

        run()

    @on_shared_loop
    async def test_a_flipped_bit(self) -> None:
        """It may hit a small collective, or a chunk of a large one."""
        for elements in (4, 100):
            async with theatre() as stage:
                out = torch.zeros(elements)
                handle = stage.backend.all_reduce(torch.ones(elements), out=out)
                announced = await stage.heard.get()
                if elements == 4:
                    frame = b"".join(encode(replace(announced, data=bytes(16), frame=None)))
                else:
                    await stage.announce_like(announced)
                    frame = b"".join(encode(Chunk(1, announced.group, announced.sequence, block=0, offset=0, data=bytes(64))))
                damaged = bytearray(frame)
                damaged[-5] ^= 0x10
                await stage.send_bytes(bytes(damaged))
                with pytest.raises(PeerLost, match=r"checksum of a chunk .* does not match"):
                    await handle
                assert out.abs().sum() == 0

    @pytest.mark.parametrize(
        ("block", "offset", "size"),
        [(0, 4, 64), (0, 0, 63), (0, 0, 512), (1, 0, 64), (2, 0, 64), (7, 0, 64), (2**32 - 1, 0, 4), (0, 2**40, 4)],
        ids=["gap", "half an element", "too much", "begins here", "ends here", "no block", "far beyond", "far offset"],
    )
    def test_a_chunk_that_does_not_fit(self, block: int, offset: int, size: int) -> None:
        """Of a ring all_reduce of 50 + 50 elements, in which rank 0 gets block 0, to add, and then block 2 + 1, complete."""

        @on_shared_loop
        async def run() -> None:
            async with theatre() as stage:
                handle = stage.backend.all_reduce(torch.ones(100))
                announced = await stage.heard.get()
                await stage.announce_like(announced)
                await stage.send(Chunk(1, announced.group, announced.sequence, block, offset, bytes(size)))
                with pytest.raises(
                    ProtocolError,
                    match=f"rank 1 sent {size} bytes of block {block} at offset {offset}, which were not due; expected offset 0",
                ):
                    await handle
                abort = await until_abort(stage)
                assert abort.reason == mesh_pb2.Abort.FAILED
                await still_works_after(stage)

        run()

    @pytest.mark.parametrize(
        ("block", "offset", "size"),
        [(0, 4, 24), (0, 0, 20), (0, 0, 28), (1, 0, 24), (2, 0, 24), (3, 8, 24), (7, 0, 24)],
        ids=["gap", "too little", "too much", "its own block", "my own sum", "part of a sum", "no block"],
    )
    def test_a_chunk_that_does_not_fit_two_shots(self, block: int, offset: int, size: int) -> None:
        """Of an all_reduce of 6 + 6 elements, in which rank 0 gets block 0, to add, and then block 2 + 1, complete."""

        @on_shared_loop
        async def run() -> None:
            async with theatre() as stage:
                handle = stage.backend.all_reduce(torch.ones(12))
                announced = await stage.heard.get()
                await stage.announce_like(announced)
                await stage.send(Chunk(1, announced.group, announced.sequence, block, offset, bytes(size)))
                with pytest.raises(
                    ProtocolError, match=f"rank 1 sent {size} bytes of block {block} at offset {offset}, expected 24 bytes of "
                ):
                    await handle
                await still_works_after(stage)

        run()

    @on_shared_loop
    async def test_a_contribution_that_comes_twice(self) -> None:
        async with theatre() as stage:
            handle = stage.backend.all_reduce(torch.ones(12))
            announced = await stage.heard.get()
            await stage.announce_like(announced)
            for _ in range(2):
                await stage.send(Chunk(1, announced.group, announced.sequence, 0, 0, bytes(24)))
            with pytest.raises(ProtocolError, match="rank 1 sent 24 bytes of block 0 at offset 0, which it had already sent"):
                await handle
            await still_works_after(stage)

    @on_shared_loop
    async def test_data_before_the_announcement(self) -> None:
        """Eager data comes with its announcement. Without that it is refused, since nobody has asked for it."""
        async with theatre() as stage:
            handle = stage.backend.all_to_all(torch.ones(2), send_sizes=[1, 1], recv_sizes=[1, 1])
            announced = await stage.heard.get()
            await stage.send(Chunk(1, announced.group, announced.sequence, data=bytes(1000)))
            with pytest.raises(ProtocolError, match="rank 1 sent 1000 bytes at offset 0, which were not due; expected offset 0"):
                await handle

    @on_shared_loop
    async def test_of_another_epoch(self) -> None:
        """It is dropped, since it is from before the last change of members."""
        async with theatre() as stage:
            await stage.send(Chunk(0, 0, 0, data=b"old", control=mesh_pb2.Control(abort=mesh_pb2.Abort(detail="old"))))
            await still_works(stage)
            assert stage.backend.telemetry.stale_chunks == 1

    @on_shared_loop
    async def test_of_a_collective_that_has_ended(self) -> None:
        async with theatre() as stage:
            await still_works(stage)
            await stage.send(Chunk(1, 0, 0, data=b"late"))
            await still_works(stage)
            assert stage.backend.telemetry.stale_chunks == 1

    @on_shared_loop
    async def test_of_a_group_that_it_is_no_member_of(self) -> None:
        async with theatre() as stage:
            ours = stage.backend.subgroup([0])  # kept, or it would be over
            await stage.send(Chunk(1, ours._group.id, 0, data=b"hello"))
            code, text = await stage.stream.refusal()
            assert code is grpc.StatusCode.DATA_LOSS
            assert "rank 1 is no member of group" in text

    @on_shared_loop
    async def test_an_answer_to_no_offer(self) -> None:
        """Rank 0 has no window: a rank that claims to see one would be sent data through it."""
        async with theatre() as stage:
            await stage.send(Chunk(1, 0, 0, control=mesh_pb2.Control(window_answer=mesh_pb2.WindowAnswer())))
            code, text = await stage.stream.refusal()
            assert (code, text) == (grpc.StatusCode.DATA_LOSS, "rank 1 answered the offer of a window, but this rank has offered none")

    @on_shared_loop
    async def test_larger_than_allowed(self) -> None:
        """gRPC refuses it before it is allocated, and ends the stream."""
        async with theatre() as stage:
            handle = stage.backend.barrier()
            await stage.send_bytes(bytes(200 * 1024))
            with pytest.raises(PeerLost, match="its connection broke"):
                await handle

    @on_shared_loop
    async def test_another_signature(self) -> None:
        """It is in a hand-made announcement: the abort says in which collective each rank was."""
        async with theatre() as stage:
            handle = stage.backend.barrier()
            await stage.heard.get()
            await stage.send(Chunk(1, 0, 0, control=mesh_pb2.Control(announcement=mesh_pb2.Announcement(signature="dance()"))))
            with pytest.raises(CollectiveMismatch, match=r"rank 0 is in barrier\(\) but rank 1 is in dance\(\)"):
                await handle
            assert (await until_abort(stage)).reason == mesh_pb2.Abort.MISMATCH

    @pytest.mark.parametrize("reason", [mesh_pb2.Abort.LOST, mesh_pb2.Abort.REASON_UNSPECIFIED, 77])
    def test_aborts_without_what_belongs_to_them(self, reason: mesh_pb2.Abort.Reason) -> None:
        """For example from a newer worker: it is still one of our errors."""

        @on_shared_loop
        async def run() -> None:
            async with theatre() as stage:
                handle = stage.backend.barrier()
                await stage.heard.get()
                await stage.send(Chunk(1, 0, 0, control=mesh_pb2.Control(abort=mesh_pb2.Abort(reason=reason, detail="enough"))))
                with pytest.raises(CollectiveError, match="barrier #0 was aborted by rank 1: enough"):
                    await handle

        run()

    @on_shared_loop
    async def test_probes(self) -> None:
        """Asked about a collective that it has not entered, and about one that it has."""
        async with theatre() as stage:
            await still_works(stage)
            for sequence, entered in ((0, True), (1, False)):
                await stage.send(Chunk(1, 0, sequence, control=mesh_pb2.Control(probe=mesh_pb2.Probe(id=5))))
                reply = await stage.heard.get()
                assert reply.control is not None
                assert reply.control.probe_reply == mesh_pb2.ProbeReply(id=5, entered=entered, next_sequence=1, last_signature="barrier()")


async def until_abort(stage: Theatre) -> mesh_pb2.Abort:
    async for chunk in heard_by(stage):
        if chunk.control is not None and chunk.control.HasField("abort"):
            return chunk.control.abort
    raise AssertionError("unreachable")


async def heard_by(stage: Theatre) -> AsyncIterator[Chunk]:
    while True:
        yield await stage.heard.get()


async def still_works_after(stage: Theatre) -> None:
    """Complete a barrier, after whatever rank 0 still has to say about an earlier collective."""
    handle = stage.backend.barrier()
    async for chunk in heard_by(stage):
        if chunk.control is not None and chunk.control.announcement.signature == "barrier()":
            await stage.announce_like(chunk)
            break
    await handle


class TestEnds:
    @on_shared_loop
    async def test_a_goodbye_is_not_a_break(self) -> None:
        """After it the stream may end: rank 1 has left, and is not lost."""
        async with theatre() as stage:
            await still_works(stage)
            await stage.send(Chunk(1, 0, 0, control=mesh_pb2.Control(goodbye=mesh_pb2.Goodbye())))
            await stage.stream.call.done_writing()
            await stage.stream.call
            with pytest.raises(PeerLost, match=r"lost during barrier #1: it left the cluster"):
                await stage.backend.barrier()
            assert stage.mesh._lost == {}

    @on_shared_loop
    async def test_last_words_are_no_break_yet_but_say_why_there_is_one(self) -> None:
        """A collective whose data has arrived before them must end well."""
        async with theatre() as stage:
            await stage.send(Chunk(1, 0, 0, control=mesh_pb2.Control(last_words=mesh_pb2.LastWords(why="its disk is\x07 full"))))
            await still_works(stage)
            assert stage.mesh._lost == {}
            await stage.stream.call.done_writing()
            with pytest.raises(PeerLost, match=r"lost during barrier #1: its disk is\\x07 full$"):
                await stage.backend.barrier()

    @on_shared_loop
    async def test_an_end_without_goodbye_is(self) -> None:
        async with theatre() as stage:
            handle = stage.backend.barrier()
            await stage.stream.call.done_writing()
            with pytest.raises(PeerLost, match=r"lost during barrier #0: its connection broke"):
                await handle

    @on_shared_loop
    async def test_a_cancelled_stream_is(self) -> None:
        async with theatre() as stage:
            handle = stage.backend.barrier()
            await stage.heard.get()
            stage.stream.call.cancel()
            with pytest.raises(PeerLost, match=r"lost during barrier #0"):
                await handle

    @on_shared_loop
    async def test_closing_does_not_wait_for_ever_for_a_silent_peer(self) -> None:
        """The puppet never says goodbye: closing waits drain_s for it."""
        async with theatre() as stage:
            start = asyncio.get_running_loop().time()
            await stage.backend.aclose()
            assert stage.mesh._timeouts.drain_s <= asyncio.get_running_loop().time() - start < stage.mesh._timeouts.drain_s + within_s(1.0)
            goodbye = await stage.heard.get()
            assert goodbye.control is not None
            assert [position.group for position in goodbye.control.goodbye.positions] == [0]

    @on_shared_loop
    async def test_everything_sent_arrives_before_the_goodbye(self) -> None:
        async with theatre() as stage:
            handle = stage.backend.send(torch.ones(1000), 1)
            await stage.announce_like(await stage.heard.get(), expects=4000)
            await handle
            closing = asyncio.ensure_future(stage.backend.aclose())
            received = 0
            async for chunk in heard_by(stage):
                if chunk.control is not None and chunk.control.HasField("goodbye"):
                    break
                received += len(chunk.data)
            assert received == 4000
            await closing
