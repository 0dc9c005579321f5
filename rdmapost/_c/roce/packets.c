/*
 * RoCEv2 over a UDP socket: the work whose cost grows with the number of bytes. Python
 * (rdmapost/providers/roce/) decides what to do.
 *
 * These functions never wait and keep the GIL (module.c says why). None of them trusts a packet.
 */
#include "roce/icrc.h"

#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "parts.h"

enum { MAX_SEGMENTS = 64, /* in one message; every kernel accepts that many */
       SET_SEGMENT = 103, GRO_SEGMENT = 104 }; /* linux/udp.h; old headers lack them */

static int refuse(const char *why)
{
	PyErr_SetString(PyExc_ValueError, why);
	return -1;
}

/* Release the arguments; return a number, or NULL if an exception is set. */
static PyObject *finish(Py_buffer *first, Py_buffer *second, Py_ssize_t result)
{
	PyBuffer_Release(first);
	if (second)
		PyBuffer_Release(second);
	return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(result);
}

/* ---- building packets ------------------------------------------------------- */

/* A tuple of buffers, read from front to back. */
struct source {
	PyObject *buffers;
	Py_ssize_t next, at; /* index of the next buffer; offset in `view`, the current one */
	Py_buffer view;
};

/* Read until `to` is full or nothing is left; return how many bytes, or -1 with an exception. */
static Py_ssize_t read_some(struct source *from, uint8_t *to, Py_ssize_t room)
{
	Py_ssize_t done = 0, n;

	for (; done < room; done += n, from->at += n) {
		while (from->at == from->view.len) {
			PyBuffer_Release(&from->view);
			from->view.len = from->at = 0;
			if (from->next == PyTuple_Size(from->buffers))
				return done;
			if (PyObject_GetBuffer(PyTuple_GetItem(from->buffers, from->next++),
					       &from->view, PyBUF_SIMPLE))
				return -1;
		}
		n = from->view.len - from->at;
		n = n < room - done ? n : room - done;
		memmove(to + done, (char *)from->view.buf + from->at, (size_t)n);
	}
	return done;
}

/* True if nothing is left to read. Otherwise, an exception is set. */
static int is_used_up(struct source *from)
{
	uint8_t more;
	Py_ssize_t n = read_some(from, &more, 1);

	if (n > 0)
		refuse("payload is left over, or does not fit");
	return !n;
}

/* Write one packet; return its size, or -1 with an exception. */
static Py_ssize_t build_one(uint8_t *out, Py_ssize_t room, struct rp_flow *flow, PyObject *header,
			    struct source *payload, Py_ssize_t mtu, Py_ssize_t id)
{
	Py_ssize_t size, n, padding;
	char *bytes;
	uint32_t icrc;

	if (PyBytes_AsStringAndSize(header, &bytes, &size))
		return -1;
	room = (room < flow->longest ? room : flow->longest) - ICRC - size;
	if (size < BTH || mtu < 0 || room < 0)
		return refuse("a header or mtu is too small, or a packet is too large");
	memcpy(out, bytes, (size_t)size);
	n = read_some(payload, out + size, mtu < room ? mtu : room);
	/* The next packet must not get the payload that this one has no room for. */
	if (n < 0 || (n == room && n < mtu && !is_used_up(payload)))
		return -1;
	padding = -(size + n) & 3;
	if (padding > room - n)
		return refuse("a packet is too large");
	out[1] = (uint8_t)((out[1] & ~0x30) | padding << 4);
	for (size += n; padding; padding--)
		out[size++] = 0;
	icrc = rp_icrc(flow, out, size + ICRC, id);
	for (int i = 0; i < ICRC; i++)
		out[size++] = (uint8_t)(icrc >> 8 * i);
	return size;
}

static PyObject *roce_build(PyObject *self, PyObject *args)
{
	Py_ssize_t mtu, done = 0, segment = 0, count = 0, n;
	struct source payload = { 0 };
	PyObject *headers, *buffers;
	Py_buffer out, given;
	struct rp_flow flow;

	(void)self;
	if (!PyArg_ParseTuple(args, "w*y*OOn", &out, &given, &headers, &buffers, &mtu))
		return NULL;
	/* Copy the lists: a buffer's exporter, if written in Python, may change them. */
	headers = PySequence_Tuple(headers);
	payload.buffers = headers ? PySequence_Tuple(buffers) : NULL;
	if (payload.buffers && !rp_read_flow(&flow, &given))
		count = PyTuple_Size(headers);
	for (Py_ssize_t i = 0; i < count; i++, done += n) {
		Py_ssize_t left = out.len - done, room = i && segment < left ? segment : left;

		n = i == MAX_SEGMENTS || done != i * segment ?
			    refuse("there are over 64 packets, or one before the last is short") :
			    build_one((uint8_t *)out.buf + done, room, &flow,
				      PyTuple_GetItem(headers, i), &payload, mtu, i);
		if (n < 0)
			break;
		segment = i ? segment : n;
	}
	if (!PyErr_Occurred())
		is_used_up(&payload);
	PyBuffer_Release(&payload.view);
	Py_XDECREF(payload.buffers);
	Py_XDECREF(headers);
	return finish(&out, &given, done);
}

/* ---- the socket ------------------------------------------------------------- */

union control {
	struct cmsghdr aligned;
	char room[256];
};

static void add_control(struct msghdr *m, int level, int type, int number, size_t size)
{
	struct cmsghdr *c = (void *)((char *)m->msg_control + m->msg_controllen);
	uint16_t word = (uint16_t)number;

	*c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(size), .cmsg_level = level, .cmsg_type = type };
	memcpy(CMSG_DATA(c), size == sizeof(word) ? (void *)&word : (void *)&number, size);
	m->msg_controllen += CMSG_SPACE(size);
}

static PyObject *roce_send(PyObject *self, PyObject *args)
{
	struct sockaddr_storage to = { 0 };
	union control control = { .room = { 0 } };
	struct iovec part;
	struct msghdr m = { .msg_name = &to, .msg_iov = &part, .msg_iovlen = 1,
			    .msg_control = &control };
	Py_buffer address, data;
	Py_ssize_t size, segment, result = 0;
	PyObject *errors = NULL, *about = Py_None;
	int fd, tos, is_ipv4;

	(void)self;
	if (!PyArg_ParseTuple(args, "iy*y*nni|O!O", &fd, &address, &data, &size, &segment, &tos,
			      &PyList_Type, &errors, &about))
		return NULL;
	is_ipv4 = address.len == sizeof(struct sockaddr_in);
	if (is_ipv4 || address.len == sizeof(struct sockaddr_in6))
		memcpy(&to, address.buf, (size_t)address.len);
	if (to.ss_family != (is_ipv4 ? AF_INET : AF_INET6) || size < 1 || size > data.len ||
	    segment < 1 || segment > UINT16_MAX || tos < 0 || tos > UINT8_MAX) {
		refuse("address, size, segment or tos is not valid");
	} else {
		m.msg_namelen = (socklen_t)address.len;
		part = (struct iovec){ data.buf, (size_t)size };
		add_control(&m, is_ipv4 ? IPPROTO_IP : IPPROTO_IPV6, is_ipv4 ? IP_TOS : IPV6_TCLASS,
			    tos, sizeof(int));
		if (size > segment)
			add_control(&m, IPPROTO_UDP, SET_SEGMENT, (int)segment, sizeof(uint16_t));
		result = sendmsg(fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? errno : 0;
		if (result && errors)
			rp_append_new(errors, Py_BuildValue("(nO)", result, about));
	}
	return finish(&address, &data, result);
}

static PyObject *roce_receive(PyObject *self, PyObject *args)
{
	struct sockaddr_storage from = { 0 };
	union control control = { .room = { 0 } };
	struct iovec part;
	struct msghdr m = { .msg_name = &from, .msg_namelen = sizeof(from), .msg_iov = &part,
			    .msg_iovlen = 1, .msg_control = &control,
			    .msg_controllen = sizeof(control) };
	int fd, error, segment = 0, tos = 0, ttl = 0;
	PyObject *file;
	Py_buffer buffer;
	ssize_t size;

	(void)self;
	if (!PyArg_ParseTuple(args, "Ow*", &file, &buffer))
		return NULL;
	/*
	 * Get the descriptor here, where no signal handler can fork before the call: a fork closes
	 * the socket.
	 */
	fd = PyObject_AsFileDescriptor(file);
	if (fd < 0) {
		PyBuffer_Release(&buffer);
		if (!PyErr_ExceptionMatches(PyExc_ValueError))
			return NULL;
		PyErr_Clear();
		Py_RETURN_NONE;
	}
	part = (struct iovec){ buffer.buf, (size_t)buffer.len };
	do /* SOCK_DESTROY (ss -K) leaves this error once; the socket still works */
		size = recvmsg(fd, &m, MSG_DONTWAIT);
	while (size < 0 && errno == ECONNABORTED);
	error = errno;
	PyBuffer_Release(&buffer);
	errno = error;
	if (size < 0)
		return error == EAGAIN ? Py_NewRef(Py_None) : PyErr_SetFromErrno(PyExc_OSError);
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		int number = *CMSG_DATA(c); /* IP_TOS is a byte; the others are ints */

		if (c->cmsg_len >= CMSG_LEN(sizeof(number)))
			memcpy(&number, CMSG_DATA(c), sizeof(number));
		if (c->cmsg_level == IPPROTO_UDP)
			segment = c->cmsg_type == GRO_SEGMENT ? number : segment;
		else if (c->cmsg_type == (c->cmsg_level == IPPROTO_IP ? IP_TOS : IPV6_TCLASS))
			tos = number;
		else if (c->cmsg_type == (c->cmsg_level == IPPROTO_IP ? IP_TTL : IPV6_HOPLIMIT))
			ttl = number;
	}
	return Py_BuildValue("nny#ii", (Py_ssize_t)size, segment > 0 ? (Py_ssize_t)segment : size,
			     &from, (Py_ssize_t)m.msg_namelen, tos, ttl);
}

/* ---- received packets ------------------------------------------------------- */

static const char OUTSIDE[] = "an offset, a size or a count is out of bounds";

static PyObject *roce_check(PyObject *self, PyObject *args)
{
	Py_ssize_t size, segment, damaged = 0, n;
	Py_buffer buffer, given;
	struct rp_flow flow;

	(void)self;
	if (!PyArg_ParseTuple(args, "w*nny*", &buffer, &size, &segment, &given))
		return NULL;
	/* The segment may be 0 if nothing was received. */
	if (size < 0 || size > buffer.len || segment < (size > 0))
		refuse(OUTSIDE);
	else if (!rp_read_flow(&flow, &given))
		for (Py_ssize_t at = 0, i = 0; at < size; at += n, i++) {
			uint8_t *packet = (uint8_t *)buffer.buf + at;

			n = segment < size - at ? segment : size - at;
			if (rp_identify(&flow, packet, n, i & 0xffff) < 0) {
				packet[0] = 0xff;
				damaged++;
			}
		}
	return finish(&buffer, &given, damaged);
}

static PyObject *roce_id(PyObject *self, PyObject *args)
{
	Py_ssize_t at, size, id = -1;
	Py_buffer buffer, given;
	struct rp_flow flow;

	(void)self;
	if (!PyArg_ParseTuple(args, "y*nny*", &buffer, &at, &size, &given))
		return NULL;
	if (at < 0 || size < 0 || at > buffer.len || size > buffer.len - at)
		refuse(OUTSIDE);
	else if (!rp_read_flow(&flow, &given))
		id = rp_identify(&flow, (const uint8_t *)buffer.buf + at, size, 0);
	return finish(&buffer, &given, id);
}

/* Whether one more packet continues the run of `count` packets that begins with `first`. */
static int continues(const uint8_t *first, Py_ssize_t count, Py_ssize_t segment)
{
	const uint8_t *bth = first + count * segment;
	uint32_t psn = (uint32_t)(bth[9] << 16 | bth[10] << 8 | bth[11]);
	uint32_t start = (uint32_t)(first[9] << 16 | first[10] << 8 | first[11]);

	/* The rest of the BTH must match, except resv8a (byte 4) and AckReq (in byte 8). */
	return !memcmp(bth, first, 4) && !memcmp(bth + 5, first + 5, 3) &&
	       ((psn - start) & 0xffffff) == (count & 0xffffff);
}

static PyObject *roce_run(PyObject *self, PyObject *args)
{
	Py_ssize_t size, segment, at, count = 1;
	Py_buffer buffer;

	(void)self;
	if (!PyArg_ParseTuple(args, "y*nnn", &buffer, &size, &segment, &at))
		return NULL;
	if (size > buffer.len || segment < 1 || at < 0 || at >= size)
		refuse(OUTSIDE);
	else
		while (segment >= BTH && count < (size - at) / segment &&
		       continues((const uint8_t *)buffer.buf + at, count, segment))
			count++;
	return finish(&buffer, NULL, count);
}

static PyObject *roce_gather(PyObject *self, PyObject *args)
{
	Py_ssize_t at, segment, count, skip, payload, done = 0;
	Py_buffer target, buffer;

	(void)self;
	if (!PyArg_ParseTuple(args, "w*y*nnnn", &target, &buffer, &at, &segment, &count, &skip))
		return NULL;
	/* In this order, nothing overflows. */
	if (at < 0 || at > buffer.len || segment < ICRC || skip < 0 || skip > segment - ICRC ||
	    count < 0 || count > (buffer.len - at) / segment ||
	    count * (payload = segment - ICRC - skip) > target.len)
		refuse(OUTSIDE);
	else
		for (; count; count--, at += segment, done += payload)
			memmove((char *)target.buf + done, (char *)buffer.buf + at + skip,
				(size_t)payload);
	return finish(&target, &buffer, done);
}

static PyMethodDef functions[] = {
	{ "roce_build", roce_build, METH_VARARGS, NULL },
	{ "roce_send", roce_send, METH_VARARGS, NULL },
	{ "roce_receive", roce_receive, METH_VARARGS, NULL },
	{ "roce_check", roce_check, METH_VARARGS, NULL },
	{ "roce_id", roce_id, METH_VARARGS, NULL },
	{ "roce_run", roce_run, METH_VARARGS, NULL },
	{ "roce_gather", roce_gather, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_roce_packets(PyObject *module)
{
	rp_init_icrc();
	return PyModule_AddFunctions(module, functions);
}
