import socket
import threading
from collections.abc import Iterator

import pytest

from engine.channel import Channel
from engine.errors import HandshakeError, ServiceGone
from engine.framing import TO_SERVICE, FrameReader, encode
from engine.messages import Cancel, Heartbeat, LoadProgress, Stop

BIG = LoadProgress("x" * (8 << 20), 0, 0)
"""Far more than a socket buffers."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    service, engine = socket.socketpair()
    with service, engine:
        yield service, Channel(engine, 3, stall_s=0.2)


def test_poll_returns_what_has_arrived(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    assert channel.poll(0) == []
    assert channel.poll(0.01) == []
    service.sendall(encode(3, Cancel([1])) + encode(2, Cancel([2])) + encode(3, Stop()))
    assert channel.poll(None) == [Cancel([1]), Stop()]


def test_poll_waits_for_the_rest_of_a_frame(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    frame = encode(3, Cancel([1]))
    service.sendall(frame[:5])
    assert channel.poll(0.01) == []
    timer = threading.Timer(0.05, service.sendall, [frame[5:]])
    timer.start()
    assert channel.poll(None) == [Cancel([1])]
    timer.join()


def test_end_of_file_is_the_end_of_the_service(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    service.sendall(encode(3, Stop()))
    service.close()
    assert channel.poll(None) == [Stop()]
    for act in (lambda: channel.poll(None), lambda: channel.poll(0), lambda: channel.send(BIG)):
        with pytest.raises(ServiceGone):
            act()
    with pytest.raises(ServiceGone):
        channel.try_send(Heartbeat(1, False, 0.0))


def test_a_message_larger_than_the_socket_arrives_whole(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    sender = threading.Thread(target=channel.send, args=[BIG])
    sender.start()
    reader = FrameReader(TO_SERVICE, 3)
    messages: list[object] = []
    while not messages:
        messages += reader.feed(service.recv(1 << 16))
    sender.join()
    assert messages == [BIG]


def test_two_senders_do_not_mix_their_frames(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    large = LoadProgress("y" * 300_000, 0, 0)
    senders = [threading.Thread(target=lambda: [channel.send(large) for _ in range(20)]) for _ in range(2)]
    for sender in senders:
        sender.start()
    reader = FrameReader(TO_SERVICE, 3)
    messages: list[object] = []
    while len(messages) < 40:
        messages += reader.feed(service.recv(1 << 16))
    for sender in senders:
        sender.join()
    assert messages == [large] * 40


def test_a_service_that_reads_nothing_is_given_up(pair: tuple[socket.socket, Channel]) -> None:
    _, channel = pair
    with pytest.raises(ServiceGone, match="read nothing"):
        channel.send(BIG)


def test_a_heartbeat_is_left_out_rather_than_waited_with(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    sent = 0
    while channel.try_send(Heartbeat(sent, False, 0.0)):
        sent += 1
    reader = FrameReader(TO_SERVICE, 3)
    beats: list[object] = []
    service.setblocking(False)
    while len(beats) < sent:
        beats += reader.feed(service.recv(1 << 20))
    assert beats == [Heartbeat(n, False, 0.0) for n in range(sent)]
    assert channel.try_send(Heartbeat(sent, False, 0.0))


def test_a_heartbeat_does_not_wait_for_another_sender(pair: tuple[socket.socket, Channel]) -> None:
    _, channel = pair
    with channel._send_lock:
        assert not channel.try_send(Heartbeat(1, False, 0.0))


def test_garbage_is_an_error(pair: tuple[socket.socket, Channel]) -> None:
    service, channel = pair
    service.sendall(b"\3\0\0\0abc")
    with pytest.raises(HandshakeError):
        channel.poll(None)
