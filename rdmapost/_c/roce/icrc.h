/* Packets' ICRCs, and the IP and UDP headers that they cover. */
#ifndef RP_ROCE_ICRC_H
#define RP_ROCE_ICRC_H

#include "base.h"

enum { BTH = 12, ICRC = 4, UDP = 8, IPV4 = 20, IPV6 = 40, ONES = 8 }; /* bytes */

/* The headers in front of each packet of a call. */
struct rp_flow {
	uint8_t bytes[ONES + IPV6 + UDP + BTH]; /* what the ICRC covers, up to the end of the BTH */
	int is_ipv4;
	Py_ssize_t ip, longest; /* the size of the IP header, and of the largest packet */
};

void rp_init_icrc(void);

/* 0, or -1 with an exception. */
int rp_read_flow(struct rp_flow *flow, const Py_buffer *given);

/* `size` includes the ICRC; `id` is IPv4's identification. */
uint32_t rp_icrc(struct rp_flow *flow, const uint8_t *packet, Py_ssize_t size, Py_ssize_t id);

/*
 * Return the IPv4 identification with which the packet's ICRC is correct, or 0 for an intact IPv6
 * packet; -1 for a corrupted packet, IPv4 or IPv6.
 */
Py_ssize_t rp_identify(struct rp_flow *flow, const uint8_t *packet, Py_ssize_t size,
		       Py_ssize_t guess);

#endif
