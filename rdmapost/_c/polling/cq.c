/*
 * Polling a completion queue, and waiting for its events.
 *
 * Polled completions are matched with their work requests at once (posting/inflight.c restores the
 * caller's wr_id), without running Python, and appended to the backlog. They become WCs only after
 * the lock is released, because creating them may run finalizers and raise any exception.
 * Undelivered completions go back to the front of the backlog.
 */
#include "polling/poller.h"

#include <endian.h>
#include <poll.h>
#include <structmember.h>

#include "parts.h"
#include "polling/wc.h"

enum { BATCH = 64 };

/* Python preallocates the integers up to 256. */
enum { SMALL_NUMBERS = 256 };

/* While tasks lead, a thread polls this often: their event loop may be stopped or blocked. */
enum { RECHECK_NS = 20000000 };

/* How long a wait holds back so that earlier waits can take completions first. */
enum { YIELD_NS = 10000000 };

struct rp_slot rp_poller_slot;
static PyObject *poller_type;

/* The time `ns` from now, or the deadline if that is earlier. */
static int64_t within(int64_t ns, int64_t deadline)
{
	int64_t then = rp_now_ns() + ns;

	return then < deadline ? then : deadline;
}

/*
 * Begin a verb that polls the CQ; 0, or -1 with an exception. The handle must be the CQ's, because
 * the device would take any handle's struct for a CQ's.
 */
static int begin_polling(const struct poller *p, PyObject *const *args, Py_ssize_t nargs,
			 Py_ssize_t wanted, struct rp_use *use)
{
	if (nargs == wanted && (!rp_is_handle(args[0]) ||
				((struct rp_handle *)args[0])->serial != p->cq)) {
		PyErr_SetString(PyExc_TypeError, "expected a CQ");
		return -1;
	}
	return begin(args, nargs, wanted, use);
}

/* ---- the backlog -------------------------------------------------------- */

/*
 * What a batch needs: the queues to release after it (those whose work requests it retired, and
 * those that the poller's `last` pointed to before), and where its completions go.
 */
struct batch {
	struct rp_in_flight *queue[2 * BATCH];
	int count;
	char *rows; /* where the next completion goes, or NULL for the backlog */
};

/* Ensure that there are `count` spares; 0 or ENOMEM. */
static int ensure_spares(struct poller *p, size_t count)
{
	while (p->spares < count) {
		struct rp_completion *s = PyMem_Calloc(1, sizeof(*s));

		if (!s)
			return ENOMEM;
		s->next = p->spare;
		p->spare = s;
		p->spares++;
	}
	return 0;
}

/* Take `count` off the front of the backlog. */
static struct rp_completion *take_first(struct poller *p, uint64_t count)
{
	struct rp_completion *list = p->backlog, **last = &list;

	for (; count; count--, p->there--)
		last = &(*last)->next;
	p->backlog = *last;
	if (!p->backlog)
		p->end = &p->backlog;
	*last = NULL;
	return list;
}

/* ---- rows --------------------------------------------------------------- */

/* A completion in the caller's buffer (WC_DTYPE), which may be at any address. */
typedef struct ibv_wc row_wc __attribute__((aligned(1)));

/* Copy a completion's valid fields into a row. */
static inline void put_row(char **rows, const struct ibv_wc *wc, uint64_t wr_id)
{
	row_wc *row = (void *)*rows;
	uint32_t imm_data = 0;

	*rows += sizeof(*row);
	if (__builtin_expect(wc->status != IBV_WC_SUCCESS, 0)) {
		*row = (struct ibv_wc){ .wr_id = wr_id, .status = wc->status,
					.vendor_err = wc->vendor_err, .qp_num = wc->qp_num };
		return;
	}
	if (wc->opcode & IBV_WC_RECV && wc->wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV))
		imm_data = wc->wc_flags & IBV_WC_WITH_IMM ? be32toh(wc->imm_data) :
							    wc->invalidated_rkey;
	memcpy(row, wc, sizeof(*row));
	row->wr_id = wr_id;
	row->imm_data = imm_data;
}

/* Copy a completion in the backlog into a row; 0, or -1 with an exception. */
static int put_kept_row(char **rows, struct rp_completion *s)
{
	Py_ssize_t size;
	PyObject *row;
	char *bytes;

	if (!s->made) {
		put_row(rows, &s->wc, s->wr_id ? PyLong_AsUnsignedLong(s->wr_id) : s->wc.wr_id);
		return 0;
	}
	row = PyObject_CallMethod(s->made, "_row", NULL);
	if (!row || PyBytes_AsStringAndSize(row, &bytes, &size) || size != sizeof(s->wc)) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_TypeError, "a completion is not a row");
		Py_XDECREF(row);
		return -1;
	}
	memcpy(*rows, bytes, sizeof(s->wc));
	*rows += sizeof(s->wc);
	Py_DECREF(row);
	return 0;
}

/* ---- polling ------------------------------------------------------------ */

/* Whether a completion reports a receive whose sender has invalidated a key. */
static inline int invalidates(const struct ibv_wc *wc)
{
	return wc->status == IBV_WC_SUCCESS && wc->wc_flags & IBV_WC_WITH_INV &&
	       wc->opcode & IBV_WC_RECV;
}

/*
 * For a run of one queue's completions, mark their work requests as done, and write the completions
 * to the caller's rows. The run ends before the last row of the oldest call to post_columns(),
 * before another queue's completion, or before a completion, other than the first, that invalidates
 * a key. Returns its length.
 */
static int put_run(struct rp_in_flight *q, const struct ibv_wc *wc, int count, char **rows)
{
	const struct rp_entry *entry = &q->entries[q->first & (q->size - 1)];
	/* Keep these in registers: in memory, each row would wait for the previous row's writes. */
	uint64_t done = q->done, begun = q->begun, last, number = wc->wr_id >> 32;
	const uint64_t *wr_ids;
	char *at = *rows;
	int n = 0;

	if (!RP_READS_SLOTS || !q->in_order || q->first == q->end || entry->state != RP_ROWS)
		return 0;
	wr_ids = (const uint64_t *)(uintptr_t)entry->serial;
	last = entry->count;
	for (; n < count && wc[n].wr_id >> 32 == number && !(n && invalidates(&wc[n])); n++) {
		uint64_t next = begun + ((wc[n].wr_id - done) & UINT32_MAX) + 1;

		if (next >= last)
			break;
		put_row(&at, &wc[n], wr_ids[next - 1]);
		done += next - begun;
		begun = next;
	}
	q->done = done;
	q->begun = begun;
	*rows = at;
	return n;
}

/*
 * Restore the wr_ids of polled completions, and add them to the backlog or to the caller's rows.
 * The lock is held.
 */
static void match_completions(struct poller *p, const struct ibv_wc *wc,
			      const struct rp_wc_ex *more, int count, struct batch *batch)
{
	struct rp_in_flight *queue = NULL;
	uint64_t number = 0, number_of_row = 0;

	for (int i = 0; i < count; i++) {
		int good = wc[i].status == IBV_WC_SUCCESS;
		int tag_matched = good && wc[i].wc_flags & IBV_WC_TM_MATCH;
		int whole = wc[i].wc_flags & IBV_WC_TM_DATA_VALID;
		struct rp_completion *s = p->spare;
		PyObject *wr_id;
		int run;

		if (!queue || number != wc[i].wr_id >> 32) {
			number = wc[i].wr_id >> 32;
			queue = p->last && p->last->base >> 32 == number ?
					(struct rp_in_flight *)Py_NewRef((PyObject *)p->last) :
					rp_find_queue(p->queues, wc[i].wr_id);
			/* Nobody waits for the completions of a destroyed queue. */
			if (!queue)
				continue;
			batch->queue[batch->count++] = queue;
			if (queue != p->last && p->last)
				batch->queue[batch->count++] = p->last;
			if (queue != p->last)
				p->last = (struct rp_in_flight *)Py_NewRef((PyObject *)queue);
		}
		if (invalidates(&wc[i]))
			rp_note_invalidated(p->invalidated, wc[i].invalidated_rkey);
		run = batch->rows ? put_run(queue, &wc[i], count - i, &batch->rows) : 0;
		if (run) {
			i += run - 1;
			continue;
		}
		if (p->wc_flags && tag_matched && !whole)
			rp_match(queue, wc[i].wr_id);
		if (!rp_complete(queue, wc[i].wr_id, wc[i].status, &wr_id, &number_of_row))
			continue;
		if (batch->rows) {
			put_row(&batch->rows, &wc[i],
				wr_id ? PyLong_AsUnsignedLong(wr_id) : number_of_row);
			Py_XDECREF(wr_id);
			continue;
		}
		s->wr_id = wr_id;
		s->made = NULL;
		s->wc = wc[i];
		s->wc.wr_id = number_of_row;
		s->has = good ? p->wc_flags : 0;
		/* An unexpected message has the tag in its header. */
		if (!tag_matched || wc[i].opcode != IBV_WC_TM_RECV)
			s->has &= ~(unsigned int)IBV_WC_EX_WITH_TM_INFO;
		if (s->has)
			s->more = more[i];
		p->spare = s->next;
		p->spares--;
		s->next = NULL;
		*p->end = s;
		p->end = &s->next;
		p->there++;
	}
}

/*
 * Poll for up to `max` completions, with the lock held, spinning for up to `spin_ns` until there
 * are that many. The completions delivered last can still be put back afterwards. Returns how many
 * were polled, or a negative errno.
 */
static int poll_batch(struct poller *p, const struct rp_handle *handle, int max, int64_t spin_ns,
		      struct batch *batch)
{
	struct rp_wc_ex more[BATCH];
	struct ibv_wc wc[BATCH];
	int min = spin_ns ? max : 0, n;
	PyThreadState *thread;

	if (!batch->rows && ensure_spares(p, (size_t)max + p->lent))
		return -ENOMEM;
	thread = spin_ns ? PyEval_SaveThread() : NULL;
	errno = 0;
	n = rp_poll_cq(handle->address, wc, p->wc_flags ? more : NULL, max, min, spin_ns);
	if (n < 0)
		n = errno ? -errno : -EIO;
	if (thread)
		PyEval_RestoreThread(thread);
	match_completions(p, wc, more, n, batch);
	return n;
}

/*
 * The completions to take: `count` of them if that leaves `promised` for asyncio tasks, else none.
 * With `fewer`, as many as are available, up to `count`.
 */
struct order {
	uint64_t count, promised;
	const struct waiter *after; /* waits that began before this come first; NULL: no waits do */
	int fewer;
	int64_t spin_ns;
	int error; /* from polling */
	int deferred; /* enough are available; if none were taken, earlier waits come first */
	char *rows; /* the next row in the caller's buffer, or NULL for WCs */
};

/* Count the completions that waits older than `me` are about to take. */
static uint64_t ahead_of(const struct poller *p, const struct waiter *me)
{
	uint64_t left = p->there;

	for (const struct waiter *w = me ? p->first : NULL; w && w != me; w = w->next)
		if (w->count <= left)
			left -= w->count;
	return p->there - left;
}

/*
 * Poll until the backlog has enough or the CQ is empty; then, unless `taken` is NULL, take the
 * completions that the order asks for. 0, or -1 with an exception: one from a signal handler, or
 * one raised because a handler has forked or this thread already holds the lock.
 */
static int gather(struct poller *p, struct rp_handle *handle, struct order *order,
		  struct rp_completion **taken)
{
	PyObject *raised;
	uint64_t wanted = order->count + order->promised;
	struct batch batch;
	uint64_t ahead;
	int polled;

	do {
		batch.count = polled = 0;
		raised = rp_run_device();
		if (raised) {
			rp_raise(raised);
			return -1;
		}
		if (lock_in_verb(p, handle))
			return -1;
		ahead = ahead_of(p, order->after);
		batch.rows = order->fewer && !p->there ? order->rows : NULL;
		if (p->there < wanted + ahead) {
			uint64_t lacking = wanted + ahead - p->there;

			polled = poll_batch(p, handle, lacking < BATCH ? (int)lacking : BATCH,
					    order->spin_ns, &batch);
			order->error = polled < 0 ? -polled : 0;
			order->rows = batch.rows ? batch.rows : order->rows;
		}
		ahead = ahead_of(p, order->after);
		order->deferred = p->there >= wanted;
		if (polled < BATCH && taken && (order->fewer || p->there - ahead >= wanted))
			*taken = take_first(p, order->count < p->there ? order->count : p->there);
		if (polled > 0 && p->there)
			rp_wake_waiters(p);
		unlock_poller(p);
		for (int i = 0; i < batch.count; i++) {
			rp_drop_done(batch.queue[i]);
			Py_DECREF((PyObject *)batch.queue[i]);
		}
		/*
		 * Rows count as delivered once written: do not poll another batch, which could
		 * fail.
		 */
	} while (polled == BATCH && !batch.rows);
	return 0;
}

/* ---- delivering --------------------------------------------------------- */

/* Free the first completion of a list; return the next. */
static struct rp_completion *free_completion(struct rp_completion *s)
{
	struct rp_completion *next = s->next;

	Py_XDECREF(s->wr_id);
	Py_XDECREF(s->made);
	PyMem_Free(s);
	return next;
}

/*
 * Turn a delivered list into spares, and free the excess. Keep enough spares that the `lent`
 * completions the caller now holds, and any lent earlier that another thread may still hold, can be
 * put back without allocating memory.
 */
static void recycle(struct poller *p, struct rp_completion *list, size_t lent)
{
	int locked = lock_if_free(p);
	size_t limit = p->lent + lent < BATCH ? BATCH : p->lent + lent;

	p->lent = list ? lent : p->lent;
	for (; list && p->spares < limit; p->spares++) {
		struct rp_completion *s = list;

		list = s->next;
		s->next = p->spare;
		p->spare = s;
	}
	unlock_if(p, locked);
	while (list)
		list = free_completion(list);
}

/*
 * Return a spare completion (each delivered completion has left one), or a new one; NULL if out of
 * memory.
 */
static struct rp_completion *take_spare(struct poller *p)
{
	struct rp_completion *s;
	int locked = lock_if_free(p);

	s = p->spare;
	if (s) {
		p->spare = s->next;
		p->spares--;
	}
	unlock_if(p, locked);
	return s ? s : PyMem_Calloc(1, sizeof(*s));
}

/* Return undelivered completions to the front of the backlog. */
static void put_back(struct poller *p, struct rp_completion *list)
{
	struct rp_completion **last = &list;
	int locked;

	if (!list)
		return;
	locked = lock_if_free(p);
	for (; *last; last = &(*last)->next)
		p->there++;
	if (!p->backlog)
		p->end = last;
	*last = p->backlog;
	p->backlog = list;
	rp_wake_waiters(p);
	unlock_if(p, locked);
	rp_notify_tasks_surely(p);
}

/* Raise a poll's error, which may be our own ENOMEM; returns NULL. */
static PyObject *raise_polling(int error)
{
	return error == ENOMEM ? PyErr_NoMemory() : rp_raise_verbs("ibv_poll_cq", error);
}

/*
 * Gather the completions that `order` asks for, and deliver them: as rows if `order->rows` is set,
 * else as WCs appended to `wcs`. Returns how many, or -1 with an exception; those not delivered go
 * back to the backlog. A polling error is raised only if there was no completion.
 */
static Py_ssize_t deliver(struct poller *p, struct rp_handle *handle, struct order *order,
			  PyObject *wcs)
{
	struct rp_completion *list = NULL, *done = NULL;
	const char *rows = order->rows;
	Py_ssize_t n = 0;

	if (gather(p, handle, order, &list))
		return -1;
	if (order->rows != rows)
		return (order->rows - rows) / (Py_ssize_t)sizeof(struct ibv_wc);
	if (!list && order->error) {
		raise_polling(order->error);
		return -1;
	}
	while (list) {
		struct rp_completion *s = list;
		PyObject *wc = order->rows ? NULL : s->made ? Py_NewRef(s->made) : rp_make_wc(s);
		int failed = order->rows ? put_kept_row(&order->rows, s) :
					   !wc || PyList_Append(wcs, wc);

		Py_XDECREF(wc);
		if (failed) {
			put_back(p, list);
			break;
		}
		n++;
		list = s->next;
		Py_CLEAR(s->wr_id);
		Py_CLEAR(s->made);
		s->next = done;
		done = s;
	}
	recycle(p, done, order->rows ? 0 : (size_t)PyList_Size(wcs));
	return list ? -1 : n;
}

/* Read an argument that is a number of completions; 0, or -1 with an exception if it is wrong. */
static int read_count(PyObject *arg, const char *name, uint64_t *count)
{
	Py_ssize_t value = PyNumber_AsSsize_t(arg, NULL);

	*count = (uint64_t)value;
	if (value >= 0)
		return 0;
	if (!PyErr_Occurred())
		PyErr_Format(PyExc_ValueError, "%s=%zd is negative", name, value);
	return -1;
}

/* poll(handle, max_entries, wcs): append the completions available now to a list. */
static RP_POLLER_METHOD(poll_now)
{
	struct order order = { .fewer = 1 };
	struct rp_use use;
	Py_ssize_t n = -1;

	if (begin_polling(POLLER(self), args, nargs, 3, &use))
		return NULL;
	if (!PyList_Check(args[2]))
		PyErr_SetString(PyExc_TypeError, "poll() takes a list");
	else if (!read_count(args[1], "max_entries", &order.count))
		n = deliver(POLLER(self), use.handle, &order, args[2]);
	rp_end_use(&use);
	return n < 0 ? NULL : Py_NewRef(Py_None);
}

/*
 * After deliver() has written the first rows, with the result `got`, add the other available
 * completions. Returns the total number of rows, or -1.
 */
static Py_ssize_t fill_rows(struct poller *p, struct rp_handle *handle, const Py_buffer *view,
			    struct order *begun, Py_ssize_t got)
{
	struct order order = { .fewer = 1, .rows = begun->rows, .error = begun->error };
	char *end = (char *)view->buf + view->len;

	while (got > 0 && order.rows < end) {
		order.count = (uint64_t)(end - order.rows) / sizeof(struct ibv_wc);
		got = deliver(p, handle, &order, NULL);
	}
	if (got < 0 && order.rows == view->buf)
		return -1;
	/* The rows are delivered; raise a signal handler's exception later. */
	if (got < 0 && order.error)
		PyErr_Clear();
	else if (got < 0)
		rp_handler_raised();
	if (got < 0)
		rp_deliver_soon();
	return (order.rows - (char *)view->buf) / (Py_ssize_t)sizeof(struct ibv_wc);
}

/* Reserve memory for the result, so that the number of rows written can always be returned. */
static PyObject *reserve_number(void)
{
	return PyLong_FromSsize_t(PY_SSIZE_T_MAX);
}

/*
 * Return n as a Python int, or NULL if n is -1. Steals the reference to `reserve`, an int allocated
 * in advance: freeing it makes room for the result if memory has run out.
 */
static PyObject *number_of_rows(Py_ssize_t n, PyObject *reserve)
{
	PyObject *number = n < 0 ? NULL : PyLong_FromSsize_t(n);
	int lacks_memory = n >= 0 && !number;

	Py_XDECREF(reserve);
	if (!lacks_memory)
		return number;
	PyErr_Clear();
	return PyLong_FromSsize_t(n);
}

/* poll_into(buffer): write the available completions as rows; return how many. */
PyObject *rp_poll_into(PyObject *self, PyObject *buffer)
{
	PyObject **at = rp_slot_at(self, &rp_poller_slot);
	PyObject *p = at && *at ? Py_NewRef(*at) : PyObject_GetAttr(self, rp_poller_slot.name);
	PyObject *reserve = NULL;
	struct rp_use use;
	Py_ssize_t n = -1;
	Py_buffer view;

	if (!p && PyErr_ExceptionMatches(PyExc_AttributeError)) {
		/* The CQ's constructor has not run. */
		PyErr_Clear();
		rp_raise_closed((struct rp_handle *)self);
	}
	if (p && !Py_IS_TYPE(p, (PyTypeObject *)poller_type)) {
		PyErr_SetString(PyExc_TypeError, "expected a CQ");
		Py_CLEAR(p);
	}
	if (p && !rp_get_rows(buffer, &view)) {
		if (!begin_polling(POLLER(p), &self, 1, 1, &use)) {
			struct order order = { .rows = view.buf };

			/* Small numbers are preallocated. */
			if (view.len > SMALL_NUMBERS * (Py_ssize_t)sizeof(struct ibv_wc))
				reserve = reserve_number();
			if (!PyErr_Occurred())
				n = fill_rows(POLLER(p), use.handle, &view, &order, 1);
			rp_end_use(&use);
		}
		PyBuffer_Release(&view);
	}
	Py_XDECREF(p);
	return number_of_rows(n, reserve);
}

/* ---- waiting ------------------------------------------------------------ */

/* Request an event; 0, or -1 with an exception. */
static int ask_for_event(const struct rp_handle *handle, int solicited_only)
{
	int code = ibv_req_notify_cq(handle->address, solicited_only);

	if (!code)
		return 0;
	rp_raise_verbs("ibv_req_notify_cq", abs(code));
	return -1;
}

/* Sleep until the CQ has an event or another thread wakes us; 0, or -1. */
static int sleep_for_events(struct poller *p, struct rp_handle *handle, struct waiter *me,
			    int64_t deadline)
{
	struct order order = { .count = me->count };
	int leads, ready;

	if (lock_in_verb(p, handle))
		return -1;
	if (!p->leader && !p->tasks)
		p->leader = me;
	leads = p->leader == me;
	unlock_poller(p);
	if (leads) {
		/* Request an event, then poll again: earlier completions raise no event. */
		if (ask_for_event(handle, 0))
			return -1;
		if (gather(p, handle, &order, NULL))
			return -1;
		if (p->there >= me->count)
			return 0;
	} else if (rp_notify_tasks(p)) {
		return -1;
	}
	if (RP_LOAD(&p->tasks)) /* then this thread does not lead */
		deadline = within(RECHECK_NS, deadline);
	ready = rp_sleep_on_event(p, me, leads ? p->channel : -1, deadline);
	return ready > 0 ? call_optional(p->drop_event) : ready;
}

/* Give earlier waits time to take their completions. Returns 1, 0 if that time is up, or -1. */
static int defer(struct poller *p, struct waiter *me, int64_t *until, int64_t deadline)
{
	if (!*until)
		*until = within(YIELD_NS, deadline);
	if (rp_now_ns() >= *until)
		return 0;
	return rp_sleep_on_event(p, me, -1, *until) < 0 ? -1 : 1;
}

/* Sleep briefly in the middle of another verb, without joining the list of waiters; 0, or -1. */
static int nap(void)
{
	Py_BEGIN_ALLOW_THREADS
	poll(NULL, 0, 1);
	Py_END_ALLOW_THREADS
	return PyErr_CheckSignals();
}

/*
 * wait(handle, count, promised, timeout, wcs): once `count` completions and those promised to
 * others are available, append `count` of them to `wcs`, an empty list. Returns None, or on timeout
 * how many are available; raises WaitCancelled after cancel().
 *
 * If `wcs` is a buffer with room for `count` rows, write them and all others that are available.
 * Returns the number written, or on timeout -1 - n, where n is the number available.
 */
static RP_POLLER_METHOD(wait_for)
{
	struct poller *p = POLLER(self);
	struct waiter me = { .fd = -1 };
	/* The outer verb may be a leading wait, which cannot continue until this one returns. */
	int nested = rp_in_verb(), joined = 0;
	struct order order = { .count = 0 };
	PyObject *result = NULL, *reserve = NULL;
	unsigned int cancels = RP_LOAD(&p->cancels) - RP_LOAD(&p->refuses);
	int64_t deadline, until = 0;
	struct rp_use use;
	Py_buffer view;

	if (begin_polling(p, args, nargs, 5, &use))
		return NULL;
	if (!PyList_Check(args[4])) {
		if (rp_get_rows(args[4], &view)) {
			rp_end_use(&use);
			return NULL;
		}
		order.rows = view.buf;
		reserve = reserve_number();
	}
	if ((order.rows && !reserve) || read_count(args[1], "count", &order.count))
		goto out;
	if (read_count(args[2], "promised", &order.promised))
		goto out;
	deadline = rp_deadline_of(args[3]);
	if (PyErr_Occurred())
		goto out;
	if (order.rows && order.count > (uint64_t)view.len / sizeof(struct ibv_wc)) {
		PyErr_Format(PyExc_ValueError, "the buffer has room for fewer than count=%S rows", args[1]);
		goto out;
	}
	me.count = order.count + order.promised;
	order.after = nested ? NULL : &me;
	while (rp_may_wait(use.handle)) {
		Py_ssize_t n;

		/*
		 * Check first: a cancelled wait takes nothing, even if completions have arrived
		 * since.
		 */
		if (RP_LOAD(&p->cancels) != cancels) {
			PyErr_Format(rp_errors.wait_cancelled,
				     "cancel_waits() on this %S has ended the wait",
				     use.handle);
			break;
		}
		n = deliver(p, use.handle, &order, args[4]);
		if (n || !order.count) {
			if (order.rows) {
				n = fill_rows(p, use.handle, &view, &order, n ? n : 1);
				result = number_of_rows(n, reserve);
				reserve = NULL;
			} else {
				result = n < 0 ? NULL : Py_NewRef(Py_None);
			}
			break;
		}
		if (rp_now_ns() >= deadline && !order.deferred) {
			result = PyLong_FromSsize_t(order.rows ? -1 - (Py_ssize_t)p->there :
								 (Py_ssize_t)p->there);
			break;
		}
		if (nested) {
			if (nap())
				break;
		} else if (!joined) {
			/* A close from now on wakes this thread. */
			if (lock_poller(p))
				break;
			rp_join_waiters(p, &me);
			unlock_poller(p);
			joined = 1;
			order.spin_ns = p->spin_ns;
		} else if (order.deferred) {
			int defers = defer(p, &me, &until, deadline);

			if (defers < 0)
				break;
			if (!defers)
				order.after = NULL;
		} else {
			order.after = &me;
			until = 0;
			if (sleep_for_events(p, use.handle, &me, deadline))
				break;
		}
	}
	if (joined)
		rp_leave_waiters(p, &me);
out:
	if (order.rows)
		PyBuffer_Release(&view);
	Py_XDECREF(reserve);
	rp_end_use(&use);
	return result;
}

/*
 * fill(handle, count, arm): poll until the backlog has `count` or the CQ is empty; return the
 * backlog's size. First request an event if `arm` is True, or take one off the CQ's own channel if
 * it is False.
 */
static RP_POLLER_METHOD(fill)
{
	struct poller *p = POLLER(self);
	struct order order = { .count = 0 };
	PyObject *found = NULL, *arm = nargs == 3 ? args[2] : Py_None;
	struct rp_use use;

	if (begin_polling(p, args, nargs == 3 ? 2 : nargs, 2, &use))
		return NULL;
	if (!read_count(args[1], "count", &order.count) && !(arm == Py_True && ask_for_event(use.handle, 0)) &&
	    !(arm == Py_False && call_optional(p->drop_event)) &&
	    !gather(p, use.handle, &order, NULL))
		found = order.error == ENOMEM || (order.error && !p->there) ? raise_polling(order.error) :
						   PyLong_FromSize_t(p->there);
	rp_end_use(&use);
	return found;
}

/* notify(handle, solicited_only): ibv_req_notify_cq(3). */
static RP_POLLER_METHOD(notify)
{
	struct rp_use use;
	int failed;

	if (begin_polling(POLLER(self), args, nargs, 2, &use))
		return NULL;
	failed = ask_for_event(use.handle, args[1] == Py_True);
	rp_end_use(&use);
	return failed ? NULL : Py_NewRef(Py_None);
}

/* put_back(wcs): return a list of undelivered WCs to the front of the backlog. */
static PyObject *put_back_made(PyObject *self, PyObject *wcs)
{
	struct poller *p = POLLER(self);
	struct rp_completion *list = NULL;
	int failed = 0;

	if (!PyList_Check(wcs))
		return PyErr_Format(PyExc_TypeError, "put_back() takes a list");
	for (Py_ssize_t i = PyList_Size(wcs) - 1; i >= 0; i--) {
		PyObject *wc = PyList_GetItem(wcs, i);
		struct rp_completion *s;

		/* Code that has found the list with gc.get_objects() may have changed it. */
		if (!wc || !rp_is_wc(wc)) {
			PyErr_Clear();
			continue;
		}
		s = take_spare(p);
		failed = !s;
		if (failed)
			break;
		s->made = Py_NewRef(wc);
		s->next = list;
		list = s;
	}
	put_back(p, list);
	return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

/* Whether a WC has an error status; runs no Python code, whatever the status is. */
static int has_failed(PyObject *wc)
{
	PyObject *status = PyTuple_GetItem(wc, 1);
	int too_large = 0;
	long value = PyLong_Check(status) ? PyLong_AsLongAndOverflow(status, &too_large) : 0;

	return !too_large && value != IBV_WC_SUCCESS;
}

/* first_failed(): the first failed completion in the backlog, where it stays; or None. */
static PyObject *first_failed(PyObject *self, PyObject *unused)
{
	struct poller *p = POLLER(self);
	struct rp_completion copy = { .wr_id = NULL };
	int found = 0;

	(void)unused;
	if (lock_poller(p))
		return NULL;
	for (const struct rp_completion *s = p->backlog; s && !found; s = s->next) {
		found = s->made ? has_failed(s->made) : s->wc.status != IBV_WC_SUCCESS;
		copy = *s;
	}
	/* `copy` borrows from the backlog, which may change once the lock is released. */
	Py_XINCREF(copy.wr_id);
	Py_XINCREF(copy.made);
	unlock_poller(p);
	if (!found)
		Py_CLEAR(copy.made);
	else if (!copy.made)
		copy.made = rp_make_wc(&copy);
	Py_XDECREF(copy.wr_id);
	return found ? copy.made : Py_NewRef(Py_None);
}

/* ---- the type ----------------------------------------------------------- */

/*
 * Poller(cq, queues, invalidated, wc_flags, spin_ns, channel, drop_event): `cq` is None if there is
 * no CQ; `channel` is -1 and `drop_event` None if there is no channel.
 */
static PyObject *poller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *cq, *queues, *invalidated, *drop_event;
	unsigned int wc_flags;
	int channel;
	long long spin_ns;
	struct poller *p;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "OO!O!ILiO", &cq, &PyDict_Type, &queues, &PyDict_Type,
			      &invalidated, &wc_flags, &spin_ns, &channel, &drop_event))
		return NULL;
	p = (struct poller *)PyType_GenericAlloc(type, 0);
	if (!p)
		return NULL;
	p->cq = rp_is_handle(cq) ? ((struct rp_handle *)cq)->serial : 0;
	p->end = &p->backlog;
	p->queues = Py_NewRef(queues);
	p->invalidated = Py_NewRef(invalidated);
	p->drop_event = Py_NewRef(drop_event);
	p->wc_flags = wc_flags;
	p->channel = channel;
	p->spin_ns = spin_ns;
	if (rp_init_lock(&p->lock))
		Py_CLEAR(p);
	return (PyObject *)p;
}

static int poller_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct poller *p = POLLER(self);

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(p->tasks);
	Py_VISIT(p->queues);
	Py_VISIT(p->invalidated);
	Py_VISIT((PyObject *)p->last);
	Py_VISIT(p->drop_event);
	for (struct rp_completion *s = p->backlog; s; s = s->next) {
		Py_VISIT(s->wr_id);
		Py_VISIT(s->made);
	}
	return 0;
}

static int poller_clear(PyObject *self)
{
	Py_CLEAR(POLLER(self)->tasks);
	return 0;
}

static void poller_dealloc(PyObject *self)
{
	struct poller *p = POLLER(self);

	PyObject_GC_UnTrack(self);
	while (p->backlog)
		p->backlog = free_completion(p->backlog);
	while (p->spare)
		p->spare = free_completion(p->spare);
	Py_XDECREF(p->tasks);
	Py_XDECREF(p->queues);
	Py_XDECREF(p->invalidated);
	Py_XDECREF((PyObject *)p->last);
	Py_XDECREF(p->drop_event);
	rp_free_lock(&p->lock);
	rp_free(self);
}

static PyMethodDef poller_methods[] = {
	RP_METHOD_NAMED("until", rp_until),
	RP_METHOD_NAMED("poll", poll_now),
	RP_METHOD_NAMED("wait", wait_for),
	RP_METHOD(fill),
	RP_METHOD(notify),
	{ "put_back", put_back_made, METH_O, NULL },
	{ "first_failed", first_failed, METH_NOARGS, NULL },
	{ "wake_all", rp_wake_all, METH_NOARGS, NULL },
	{ "cancel", rp_cancel_waits, METH_O, NULL },
	{ "claim", rp_claim, METH_O, NULL },
	RP_METHOD_NAMED("unclaim", rp_unclaim),
	{ NULL, NULL, 0, NULL },
};

static PyObject *get_tasks(PyObject *self, void *unused)
{
	struct poller *p = POLLER(self);
	PyObject *tasks;

	(void)unused;
	if (lock_poller(p))
		return NULL;
	tasks = Py_NewRef(p->tasks ? p->tasks : Py_None);
	unlock_poller(p);
	return tasks;
}

static PyGetSetDef poller_getset[] = {
	{ "tasks", get_tasks, NULL, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMemberDef poller_members[] = {
	{ "waiting", T_UINT, offsetof(struct poller, waiting), READONLY, NULL },
	{ "cancels", T_UINT, offsetof(struct poller, cancels), READONLY, NULL },
	{ "claims", T_UINT, offsetof(struct poller, claims), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot poller_slots[] = {
	{ Py_tp_new, poller_new },
	{ Py_tp_dealloc, poller_dealloc },
	{ Py_tp_traverse, poller_traverse },
	{ Py_tp_clear, poller_clear },
	{ Py_tp_methods, poller_methods },
	{ Py_tp_getset, poller_getset },
	{ Py_tp_members, poller_members },
	{ 0, NULL },
};

int rp_add_poller(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Poller", sizeof(struct poller),
			   Py_TPFLAGS_HAVE_GC, poller_slots, &poller_type) ? -1 : 0;
}
