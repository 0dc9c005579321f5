/*
 * The common send work requests of soft0, executed without Python: SENDs, RDMA WRITEs and READs
 * between two RC queue pairs of this process, if they succeed.
 *
 * Python (providers/soft0/requester.py) executes the first one, and creates a FastPath for its
 * queue pair. From then on, C looks at each work request, and leaves to Python whatever is not
 * common, or would not succeed: C knows when memory may be accessed, but not how to refuse it.
 *
 * What C has read from Python objects is valid until one of them changes (rp_soft_changes).
 */
#include "software/device_queues.h"

/* A queue pair and its peer, which are connected. */
struct fast_path {
	PyObject_HEAD
	uint64_t as_of; /* rp_soft_changes */
	/* References, from `statuses` to `recv_events`. */
	PyObject *statuses, *refusals; /* dicts: planned faults */
	PyObject *lkeys, *rkeys; /* dicts: regions by lkey; by the upper 24 bits of the rkey */
	PyObject *pd, *peer_pd;
	PyObject *rq; /* the peer's receive queue, or None */
	PyObject *send_cq, *recv_cq;
	PyObject *send_events, *recv_events; /* of the CQs' channels, or None */
	int send_fd, recv_fd; /* their eventfds */
	unsigned int qp_num, peer_num;
	unsigned int access; /* what the peer grants */
	int reads, all_signaled;
};

static PyObject *fast_path_type, *qp_type;

/* ---- memory --------------------------------------------------------------- */

/* A region, as it was when rp_soft_changes was `as_of`. */
struct region {
	uint64_t as_of;
	PyObject *keys; /* the dict that lists it; borrowed, and only compared, as is `pd` */
	uint32_t key;
	PyObject *pd;
	uint64_t addr;
	unsigned int access;
	PyObject *memory; /* a memoryview of all of it, or NULL: Python must look */
};

enum { REGIONS = 64 };
static struct region regions[REGIONS];

/* Return a new reference to an attribute, or NULL without an exception. */
static PyObject *get(PyObject *object, enum rp_name name)
{
	PyObject *found = PyObject_GetAttr(object, rp_names[name]);

	PyErr_Clear();
	return found;
}

/* Return an attribute that is a number, or UINT64_MAX. */
static uint64_t get_number(PyObject *object, enum rp_name name)
{
	PyObject *found = get(object, name);
	uint64_t number = found ? PyLong_AsUnsignedLongLong(found) : UINT64_MAX;

	Py_XDECREF(found);
	PyErr_Clear();
	return number;
}

/* Read a region; `memory` stays NULL if it is not a valid region that cannot be unmapped. */
static void read_region(struct region *r, PyObject *region, enum rp_name key)
{
	PyObject *pd = get(region, PD), *unsure = get(region, UNSURE), *memory = NULL;

	r->addr = get_number(region, ADDR);
	r->access = (unsigned int)get_number(region, ACCESS);
	r->pd = pd; /* the region holds it */
	if (get_number(region, key) == r->key && get_number(region, VALID) == 1 && unsure == Py_None)
		memory = get(region, MEMORY);
	if (memory && PyMemoryView_Check(memory))
		r->memory = Py_NewRef(memory);
	Py_XDECREF(pd);
	Py_XDECREF(unsure);
	Py_XDECREF(memory);
}

/* Return the region with this key, or NULL if Python must look. */
static const struct region *find_region(PyObject *keys, uint32_t key, enum rp_name name)
{
	struct region *r = &regions[(key >> 8 ^ key >> 31) % REGIONS];
	PyObject *number, *region;

	if (r->as_of == rp_soft_changes && r->key == key && r->keys == keys)
		return r->memory ? r : NULL;
	Py_CLEAR(r->memory);
	*r = (struct region){ .as_of = rp_soft_changes, .key = key, .keys = keys };
	number = PyLong_FromUnsignedLong(name == RKEY ? key >> 8 : key);
	region = number ? rp_dict_get(keys, number) : NULL;
	if (region)
		read_region(r, region, name);
	Py_XDECREF(number);
	Py_XDECREF(region);
	PyErr_Clear();
	return r->memory ? r : NULL;
}

/* ---- a message's bytes ---------------------------------------------------- */

/* Pieces of memory, each with the buffer that it is part of. */
struct pieces {
	struct {
		char *at;
		uint64_t length;
		Py_buffer buffer;
	} piece[RP_MAX_SGES];
	unsigned int count;
	uint64_t size;
};

static void release_pieces(struct pieces *p)
{
	while (p->count)
		PyBuffer_Release(&p->piece[--p->count].buffer);
}

/* Add part of an object's memory, if it has such a part; returns whether it has. */
static int add_piece(struct pieces *p, PyObject *memory, uint64_t start, uint64_t length)
{
	Py_buffer *buffer = &p->piece[p->count].buffer;

	if (PyObject_GetBuffer(memory, buffer, PyBUF_SIMPLE)) {
		PyErr_Clear();
		return 0;
	}
	if (start > (uint64_t)buffer->len || length > (uint64_t)buffer->len - start) {
		PyBuffer_Release(buffer);
		return 0;
	}
	p->piece[p->count].at = (char *)buffer->buf + start;
	p->piece[p->count].length = length;
	p->count++;
	p->size += length;
	return 1;
}

/*
 * Add part of a region, if the PD, the range and the permissions allow it. The offset of an address
 * before the region wraps, so that it is larger than any region.
 */
static int add_part(struct pieces *p, const struct region *r, PyObject *pd, uint64_t addr,
		    uint64_t length, unsigned int access)
{
	if (!r || r->pd != pd || (r->access & access) != access)
		return 0;
	return add_piece(p, r->memory, addr - r->addr, length);
}

/* The longest message that C copies; from which size it lets other threads run meanwhile. */
enum { MAX_SIZE = 1 << 30, LARGE = 1 << 24 };

/*
 * Find the memory behind a work request's SGEs, up to `size` bytes. Returns 0 if Python must look.
 */
static int find_local(const struct fast_path *f, PyObject *pd, const struct wqe *wqe,
		      unsigned int access, uint64_t size, struct pieces *p)
{
	if (wqe->num_sge > RP_MAX_SGES)
		return 0;
	for (unsigned int i = 0; i < wqe->num_sge && p->size < size; i++) {
		const struct ibv_sge *sge = &wqe->sge[i];
		uint64_t left = size - p->size, length = sge->length < left ? sge->length : left;

		/* Length 0 means 2^31. */
		if (!length || !add_part(p, find_region(f->lkeys, sge->lkey, LKEY), pd, sge->addr,
					 length, access))
			return 0;
	}
	return 1;
}

static int find_remote(const struct fast_path *f, const struct ibv_send_wr *wr, uint64_t size,
		       unsigned int access, struct pieces *p)
{
	/* An empty message accesses no memory, so its key is not checked. */
	return !size || add_part(p, find_region(f->rkeys, wr->wr.rdma.rkey, RKEY), f->peer_pd,
				 wr->wr.rdma.remote_addr, size, access);
}

/* Copy all of `from` to `to`, which has at least as much room. */
static void copy(const struct pieces *to, const struct pieces *from)
{
	uint64_t done = 0, filled = 0; /* of the current pieces */

	for (unsigned int i = 0, j = 0; i < from->count;) {
		uint64_t size = from->piece[i].length - done, room = to->piece[j].length - filled;

		size = size < room ? size : room;
		memmove(to->piece[j].at + filled, from->piece[i].at + done, size);
		done += size;
		filled += size;
		if (done == from->piece[i].length) {
			i++;
			done = 0;
		}
		if (filled == to->piece[j].length) {
			j++;
			filled = 0;
		}
	}
}

/* ---- queues --------------------------------------------------------------- */

/* Return a new reference to a queue's first work request, or NULL without an exception. */
static struct wqe *first_of(PyObject *queue)
{
	PyObject *pending = QUEUE(queue)->pending, *item = NULL;

	/* A post in another thread may still take back what it has added. */
	rp_data_lock();
	if (PyObject_Size(pending) > 0)
		item = PySequence_GetItem(pending, 0);
	rp_data_unlock();
	if (item && !rp_has_type(item, rp_wqe_type))
		Py_CLEAR(item);
	PyErr_Clear();
	return (struct wqe *)item;
}

/* Drop a queue's first item; returns 0 if this thread lacks stack even for that. */
static int drop_first(PyObject *queue)
{
	PyObject *item = PyObject_CallMethodObjArgs(QUEUE(queue)->pending, rp_names[POPLEFT], NULL);

	PyErr_Clear();
	Py_XDECREF(item);
	return item != NULL;
}

/* Make a CQ entry (data_verbs.c reads it), or return NULL. */
static PyObject *make_entry(PyObject *queue, unsigned int frees, const struct ibv_wc *wc)
{
	struct {
		struct ibv_wc wc;
		struct ibv_wc_tm_info tm;
	} data = { .wc = *wc };
	PyObject *bytes = PyBytes_FromStringAndSize((char *)&data, sizeof(data));
	PyObject *count = PyLong_FromUnsignedLong(frees), *entry = NULL;

	if (bytes && count)
		entry = PyTuple_Pack(3, bytes, queue, count);
	Py_XDECREF(bytes);
	Py_XDECREF(count);
	PyErr_Clear();
	return entry;
}

static int has_room(PyObject *cq, Py_ssize_t entries)
{
	return PyObject_Size(QUEUE(cq)->pending) + entries <= (Py_ssize_t)QUEUE(cq)->depth;
}

/* Let polls see an entry, and report it to the CQ's channel, if any. */
static void show(PyObject *cq, PyObject *events, int fd, int solicited)
{
	rp_show_entries(QUEUE(cq));
	if (events != Py_None)
		rp_announce(QUEUE(cq), events, fd, solicited);
}

/* ---- executing ------------------------------------------------------------ */

/* What a work request does. */
struct operation {
	enum ibv_wc_opcode opcode;
	unsigned int access; /* to remote memory, or 0 */
	enum ibv_wc_opcode recv_opcode; /* of the receive that it consumes, or 0 */
	int has_imm;
};

static const struct operation operations[] = {
	[IBV_WR_RDMA_WRITE] = { IBV_WC_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE, 0, 0 },
	[IBV_WR_RDMA_WRITE_WITH_IMM] = { IBV_WC_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE,
					 IBV_WC_RECV_RDMA_WITH_IMM, 1 },
	[IBV_WR_SEND] = { IBV_WC_SEND, 0, IBV_WC_RECV, 0 },
	[IBV_WR_SEND_WITH_IMM] = { IBV_WC_SEND, 0, IBV_WC_RECV, 1 },
	[IBV_WR_RDMA_READ] = { IBV_WC_RDMA_READ, IBV_ACCESS_REMOTE_READ, 0, 0 },
};

/* A work request that is being executed. */
struct exchange {
	const struct operation *op;
	struct wqe *wqe, *recv;
	struct pieces from, to;
	PyObject *sent, *received; /* the CQ entries, or NULL */
};

/* Find the memory that a work request reads and writes; returns 0 if Python must look. */
static int find_buffers(const struct fast_path *f, struct exchange *e)
{
	const struct wqe *wqe = e->wqe;
	int is_read = e->op->opcode == IBV_WC_RDMA_READ;
	struct pieces *local = is_read ? &e->to : &e->from;

	if (wqe->data && is_read)
		return 0;
	if (wqe->data) {
		if (PyBytes_Size(wqe->data) &&
		    !add_piece(local, wqe->data, 0, (uint64_t)PyBytes_Size(wqe->data)))
			return 0;
	} else if (!find_local(f, f->pd, wqe, is_read ? IBV_ACCESS_LOCAL_WRITE : 0,
			       UINT64_MAX, local) || local->size > MAX_SIZE) {
		return 0;
	}
	if (e->op->access)
		return find_remote(f, &wqe->wr.send, local->size, e->op->access,
				   is_read ? &e->from : &e->to);
	return find_local(f, f->peer_pd, e->recv, IBV_ACCESS_LOCAL_WRITE, local->size, &e->to) &&
	       e->to.size == local->size;
}

/* Make the completions; returns whether there was memory for them. */
static int make_entries(const struct fast_path *f, PyObject *sq, struct exchange *e, int signaled)
{
	const struct ibv_send_wr *wr = &e->wqe->wr.send;
	struct ibv_wc wc = { .wr_id = wr->wr_id, .opcode = e->op->opcode, .qp_num = f->qp_num };

	if (wc.opcode == IBV_WC_RDMA_READ)
		wc.byte_len = (uint32_t)e->to.size;
	if (signaled)
		e->sent = make_entry(sq, QUEUE(sq)->silent + 1, &wc);
	if (e->recv) {
		wc = (struct ibv_wc){ .wr_id = e->recv->wr.recv.wr_id,
				      .opcode = e->op->recv_opcode,
				      .byte_len = (uint32_t)e->from.size,
				      .qp_num = f->peer_num };
		if (e->op->has_imm) {
			wc.imm_data = wr->imm_data;
			wc.wc_flags = IBV_WC_WITH_IMM;
		}
		e->received = make_entry(f->rq, 1, &wc);
	}
	return (e->sent || !signaled) && (e->received || !e->recv);
}

/* Undo rp_append_hidden(). */
static void withdraw(PyObject *cq)
{
	Py_XDECREF(rp_withdraw(QUEUE(cq)));
	PyErr_Clear();
}

/*
 * Put the completions on their CQs, not yet visible to polls, and take the work requests off their
 * queues; all of this, or nothing. If the first of these calls succeeds, the others have enough
 * stack.
 */
static int move_items(const struct fast_path *f, PyObject *sq, const struct exchange *e)
{
	int same = f->send_cq == f->recv_cq;

	if (e->received && !has_room(f->recv_cq, 1 + (same && e->sent)))
		return 0;
	if (e->sent && !has_room(f->send_cq, 1))
		return 0;
	if (e->received && rp_append_hidden(QUEUE(f->recv_cq), e->received))
		return 0;
	if (!e->sent || !rp_append_hidden(QUEUE(f->send_cq), e->sent)) {
		if (drop_first(sq)) {
			QUEUE(sq)->silent = e->sent ? 0 : QUEUE(sq)->silent + 1;
			if (e->recv)
				drop_first(f->rq);
			return 1;
		}
		if (e->sent)
			withdraw(f->send_cq);
	}
	if (e->received)
		withdraw(f->recv_cq);
	return 0;
}

/* Copy the bytes, and show the completions. */
static void finish(const struct fast_path *f, const struct exchange *e)
{
	int solicited = (e->wqe->flags & IBV_SEND_SOLICITED) != 0;

	if (e->from.size < LARGE) {
		copy(&e->to, &e->from);
	} else {
		/* The device's lock keeps the regions registered. */
		Py_BEGIN_ALLOW_THREADS
		copy(&e->to, &e->from);
		Py_END_ALLOW_THREADS
	}
	if (e->received)
		show(f->recv_cq, f->recv_events, f->recv_fd, solicited);
	if (e->sent)
		show(f->send_cq, f->send_events, f->send_fd, 0);
}

/*
 * Execute a work request completely, or leave it untouched for Python; return whether it was
 * executed. `size` receives the size of its message.
 */
static int execute(const struct fast_path *f, PyObject *sq, struct wqe *wqe, uint64_t *size)
{
	struct exchange e = { .wqe = wqe };
	int signaled = f->all_signaled || wqe->flags & IBV_SEND_SIGNALED, done = 0;
	unsigned int process = rp_process;

	if (wqe->opcode >= sizeof(operations) / sizeof(*operations) || wqe->owner)
		return 0;
	e.op = &operations[wqe->opcode];
	if ((f->access & e.op->access) != e.op->access || (e.op->opcode == IBV_WC_RDMA_READ && !f->reads))
		return 0;
	if (e.op->recv_opcode && f->rq != Py_None)
		e.recv = first_of(f->rq);
	if (!e.op->recv_opcode || e.recv)
		done = find_buffers(f, &e) && make_entries(f, sq, &e, signaled);
	/*
	 * The collector may have run, and a finalizer may have forked: the child must not go on
	 * with its parent's work.
	 */
	done = done && rp_process == process;
	if (done) {
		rp_data_lock();
		done = move_items(f, sq, &e);
		rp_data_unlock();
	}
	if (done)
		finish(f, &e);
	*size = e.from.size;
	release_pieces(&e.from);
	release_pieces(&e.to);
	Py_XDECREF((PyObject *)e.recv);
	Py_XDECREF(e.sent);
	Py_XDECREF(e.received);
	return done;
}

static int is_current(const struct fast_path *f)
{
	return f->as_of == rp_soft_changes && !PyDict_Size(f->statuses) && !PyDict_Size(f->refusals);
}

/*
 * After this many bytes, Python executes the next work request, so that other threads and signal
 * handlers can run; COST is what a work request costs besides its bytes, in bytes.
 */
enum { BUDGET = 1 << 24, COST = 1 << 14 };

int rp_soft_run_fast(PyObject *qp)
{
	PyObject *sq, *path = NULL;
	struct fast_path *f;
	struct wqe *wqe;
	int64_t budget = BUDGET;
	uint64_t size = 0;
	int left = 1, done = 1;

	if (!rp_has_type(qp, qp_type))
		return 1;
	sq = PyObject_GetAttr(qp, rp_names[SQ]);
	if (sq && PyObject_TypeCheck(sq, (PyTypeObject *)rp_device_queue_type))
		path = Py_XNewRef(QUEUE(sq)->fast_path);
	f = (struct fast_path *)path;
	if (path && rp_has_type(path, fast_path_type)) {
		while (done && budget > 0 && is_current(f) && (wqe = first_of(sq))) {
			done = execute(f, sq, wqe, &size);
			budget -= (int64_t)size + COST;
			Py_DECREF((PyObject *)wqe);
		}
		/* In another state than RTS, Python may have to flush receives. */
		left = !is_current(f) || PyObject_Size(QUEUE(sq)->pending) != 0;
		if (f->as_of != rp_soft_changes)
			Py_CLEAR(QUEUE(sq)->fast_path);
	}
	Py_XDECREF(path);
	Py_XDECREF(sq);
	PyErr_Clear();
	return left;
}

/* ---- for Python ----------------------------------------------------------- */

/*
 * FastPath(qp, statuses, refusals, lkeys, rkeys, pd, peer_pd, rq, (send_cq, events, event_fd),
 * (recv_cq, events, event_fd), qp_num, peer_num, access, reads, all_signaled)
 */
static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct fast_path *f = (struct fast_path *)PyType_GenericAlloc(type, 0);
	PyObject *qp, *send, *recv, *cq = rp_device_queue_type;

	(void)kwargs;
	/* Tuples keep what they hold; other sequences might not. */
	if (!f || !PyArg_ParseTuple(args, "OO!O!O!O!OOOO!O!IIIpp", &qp, &PyDict_Type,
				    &f->statuses, &PyDict_Type, &f->refusals, &PyDict_Type,
				    &f->lkeys, &PyDict_Type, &f->rkeys, &f->pd, &f->peer_pd,
				    &f->rq, &PyTuple_Type, &send, &PyTuple_Type, &recv, &f->qp_num,
				    &f->peer_num, &f->access, &f->reads, &f->all_signaled) ||
	    !PyArg_ParseTuple(send, "O!Oi", cq, &f->send_cq, &f->send_events, &f->send_fd) ||
	    !PyArg_ParseTuple(recv, "O!Oi", cq, &f->recv_cq, &f->recv_events, &f->recv_fd)) {
		/* The arguments are borrowed. */
		if (f)
			rp_free((PyObject *)f);
		return NULL;
	}
	for (PyObject **held = &f->statuses; held <= &f->recv_events; held++)
		Py_INCREF(*held);
	if (f->rq != Py_None && !PyObject_TypeCheck(f->rq, (PyTypeObject *)rp_device_queue_type)) {
		Py_DECREF((PyObject *)f);
		return PyErr_Format(PyExc_TypeError, "rq: expected DeviceQueue or None");
	}
	f->as_of = rp_soft_changes;
	if (!qp_type)
		qp_type = Py_NewRef((PyObject *)Py_TYPE(qp));
	return (PyObject *)f;
}

static void fast_path_dealloc(PyObject *self)
{
	struct fast_path *f = (struct fast_path *)self;

	for (PyObject **held = &f->statuses; held <= &f->recv_events; held++)
		Py_DECREF(*held);
	rp_free(self);
}

static PyType_Slot fast_path_slots[] = {
	{ Py_tp_new, fast_path_new },
	{ Py_tp_dealloc, fast_path_dealloc },
	{ 0, NULL },
};

int rp_add_soft_fast_path(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.FastPath", sizeof(struct fast_path), 0,
			   fast_path_slots, &fast_path_type);
}
