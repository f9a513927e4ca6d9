"""Hosts and addresses from which images may be fetched."""

from __future__ import annotations

import pytest

from tokserve.base.errors import StartError
from tokserve.features.images.media.hosts import AllowedHosts, canonical, is_public

PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")
NOT_PUBLIC = (
    "127.0.0.1",
    "127.1.2.3",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12:3456::1",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "2002:7f00:1::",
    "2001:0:5ef5:79fb::1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "",
    "example.com",
    "1.2.3",
    "0x7f000001",
)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_of_own_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_an_entry_allows_a_name_with_the_usual_ports_or_one_port() -> None:
    hosts = AllowedHosts(["Images.Example.com.", "cdn.example.com:8443", "münchen.example", "[::1]:9000", "10.0.0.5"])
    assert hosts.allows("https", "images.example.com", 443) and hosts.allows("http", "images.example.com", 80)
    assert not hosts.allows("http", "images.example.com", 443) and not hosts.allows("http", "images.example.com", 8080)
    assert hosts.allows("https", "cdn.example.com", 8443) and not hosts.allows("https", "cdn.example.com", 443)
    assert not hosts.allows("https", "example.com", 443) and not hosts.allows("https", "a.images.example.com", 443)
    assert hosts.allows("http", canonical("MÜNCHEN.example"), 80)
    assert hosts.lists_address("::1") and hosts.allows("http", "::1", 9000) and not hosts.allows("http", "::1", 80)
    assert hosts.lists_address("10.0.0.5") and not hosts.lists_address("10.0.0.6")
    assert not hosts.lists_address("images.example.com")


@pytest.mark.parametrize(
    "entry", ["", "https://example.com", "example.com/x", "*.example.com", "a@b", "a:99999", "a:b"]
)
def test_an_entry_that_is_no_host_stops_the_start(entry: str) -> None:
    with pytest.raises(StartError, match="allowed_media_domains"):
        AllowedHosts([entry])
