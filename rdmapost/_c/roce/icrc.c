/*
 * The ICRC (IBTA, Annex A17).
 *
 * It is the CRC-32 of Ethernet and zlib, over eight bytes of ones, the IP and UDP headers, and the
 * packet from its BTH on, with ones for fields that change in transit. It is stored little-endian.
 */
#include "roce/icrc.h"

#define POLYNOMIAL 0xedb88320u /* bit-reversed: bit 31 is x^0 */
#define ONE 0x80000000u

static uint32_t table[16][256]; /* a byte's contribution, by the number of bytes after it */
static uint32_t inverse[16]; /* x^(-8 * 2^i) */

static uint32_t times_x(uint32_t a)
{
	return a >> 1 ^ (a & 1 ? POLYNOMIAL : 0);
}

static uint32_t multiply(uint32_t a, uint32_t b)
{
	uint32_t product = 0;

	for (; a; a <<= 1, b = times_x(b))
		product ^= a & ONE ? b : 0;
	return product;
}

void rp_init_icrc(void)
{
	uint32_t power = ONE;

	for (uint32_t i = 0; i < 16 * 256; i++) {
		uint32_t crc = i < 256 ? i : table[i / 256 - 1][i % 256];

		for (int bit = 0; bit < 8; bit++)
			crc = times_x(crc);
		table[i / 256][i % 256] = crc;
	}
	/* Divide by x: the reverse of times_x(). */
	for (int bit = 0; bit < 8; bit++)
		power = power & ONE ? (power ^ POLYNOMIAL) << 1 | 1 : power << 1;
	for (int i = 0; i < 16; i++, power = multiply(power, power))
		inverse[i] = power;
}

static uint32_t load(const uint8_t *at)
{
	return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint32_t slice(uint32_t word, int after)
{
	return table[after + 3][word & 0xff] ^ table[after + 2][word >> 8 & 0xff] ^
	       table[after + 1][word >> 16 & 0xff] ^ table[after][word >> 24];
}

static uint32_t update(uint32_t crc, const uint8_t *at, size_t length)
{
	for (; length >= 16; at += 16, length -= 16)
		crc = slice(load(at) ^ crc, 12) ^ slice(load(at + 4), 8) ^
		      slice(load(at + 8), 4) ^ slice(load(at + 12), 0);
	for (; length; at++, length--)
		crc = crc >> 8 ^ table[0][(crc ^ *at) & 0xff];
	return crc;
}

int rp_read_flow(struct rp_flow *flow, const Py_buffer *given)
{
	const uint8_t *bytes = given->buf;
	int is_ipv4 = given->len == IPV4 + UDP && bytes[0] == 0x45;

	if (!is_ipv4 && (given->len != IPV6 + UDP || bytes[0] >> 4 != 6)) {
		PyErr_SetString(PyExc_ValueError, "flow must be an IPv4 header without options or "
						  "an IPv6 header, followed by a UDP header");
		return -1;
	}
	*flow = (struct rp_flow){ .is_ipv4 = is_ipv4, .ip = given->len - UDP,
				  .longest = UINT16_MAX - UDP - (is_ipv4 ? IPV4 : 0) };
	memset(flow->bytes, 0xff, ONES);
	memcpy(flow->bytes + ONES, bytes, (size_t)given->len);
	return 0;
}

static void put16(uint8_t *at, Py_ssize_t number)
{
	at[0] = (uint8_t)(number >> 8);
	at[1] = (uint8_t)number;
}

uint32_t rp_icrc(struct rp_flow *flow, const uint8_t *packet, Py_ssize_t size, Py_ssize_t id)
{
	uint8_t *ip = flow->bytes + ONES, *udp = ip + flow->ip, *bth = udp + UDP;
	uint32_t crc;

	put16(ip + (flow->is_ipv4 ? 2 : 4), size + UDP + (flow->is_ipv4 ? IPV4 : 0));
	if (flow->is_ipv4)
		put16(ip + 4, id);
	put16(udp + 4, size + UDP);
	memcpy(bth, packet, BTH);
	bth[4] = 0xff; /* resv8a */
	crc = update(~0u, flow->bytes, (size_t)(bth + BTH - flow->bytes));
	return ~update(crc, packet + BTH, (size_t)(size - BTH - ICRC));
}

/*
 * A UDP socket does not report the IP identification, but CRCs are linear: if two packets differ
 * only in their identifications, their CRCs differ by (id1 xor id2) times a power of x that depends
 * on the size. Divide by that power; if the result has more than 16 bits, the packet is corrupted.
 */
Py_ssize_t rp_identify(struct rp_flow *flow, const uint8_t *packet, Py_ssize_t size,
		       Py_ssize_t guess)
{
	Py_ssize_t covered = size - ICRC + UDP + IPV4 - 4; /* from the identification on */
	uint32_t error;

	if (size < BTH + ICRC || size > flow->longest)
		return -1;
	error = load(packet + size - ICRC) ^ rp_icrc(flow, packet, size, guess);
	if (!flow->is_ipv4)
		return error ? -1 : 0;
	for (int i = 0; error && i < 16; i++)
		if (covered >> i & 1)
			error = multiply(error, inverse[i]);
	return error >> 16 ? -1 : (guess ^ ((error >> 8 | error << 8) & 0xffff));
}
