/* The regions that memory windows are bound to (windows.h). */
#include "handles/internal.h"

uint64_t rp_bind_clock(void)
{
	static uint64_t count;

	return __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
}

/*
 * A window of type 2 is bound and invalidated alternately, so the first invalidation seen for a key
 * ends the first bind under that key, whatever was posted in the meantime. Binds through several
 * queue pairs may be executed in any order, though. So if a bind is posted through another queue
 * pair while an earlier bind's invalidation has not been seen, later invalidations of that key
 * cannot be matched to binds, and end none. A window's `keeps` has a struct key_counts for each
 * value of a key's low byte; a window of type 1 has none.
 */
struct key_counts {
	/* High half: binds posted; low half: invalidations seen, never more than the binds. */
	uint64_t word;
	const void *binder; /* the last bind's, or SEVERAL */
};

enum { KEYS = 256 };
static const char SEVERAL[1];

static struct key_counts *counts_of_key(PyObject *all, unsigned char key)
{
	if (!all || !PyBytes_CheckExact(all) ||
	    PyBytes_Size(all) != (Py_ssize_t)(KEYS * sizeof(struct key_counts)))
		return NULL;
	return (struct key_counts *)(void *)PyBytes_AsString(all) + key;
}

uint32_t rp_number_bind(struct rp_handle *mw, unsigned char key, const struct rp_binder *binder)
{
	struct key_counts *counts = counts_of_key(mw->keeps, key);
	uint64_t old;

	if (!counts)
		return 0;
	old = RP_LOAD(&counts->word);
	if (RP_LOAD(&counts->binder) != binder && (uint32_t)old != (uint32_t)(old >> 32))
		RP_STORE(&counts->binder, SEVERAL);
	if (RP_LOAD(&counts->binder) != SEVERAL)
		RP_STORE(&counts->binder, binder);
	return (uint32_t)(RP_ADD(&counts->word, 1ull << 32) >> 32);
}

void rp_take_back_bind(struct rp_handle *mw, unsigned char key, uint32_t number)
{
	struct key_counts *counts = counts_of_key(mw->keeps, key);
	uint64_t old = counts ? RP_LOAD(&counts->word) : 0;

	/* If another bind was posted later, the window counts as bound for longer than it is. */
	while (counts && (uint32_t)(old >> 32) == number && (uint32_t)old != number &&
	       !rp_swap_word(&counts->word, &old, old - (1ull << 32)))
		;
}

void rp_count_invalidation(PyObject *all, unsigned char key)
{
	struct key_counts *counts = counts_of_key(all, key);
	uint64_t old = counts ? RP_LOAD(&counts->word) : 0;

	while (counts && (uint32_t)old != (uint32_t)(old >> 32) &&
	       !rp_swap_word(&counts->word, &old,
			     (old & ~(uint64_t)UINT32_MAX) | (uint32_t)(old + 1)))
		;
}

static int is_invalidated(struct rp_handle *mw, const struct rp_bind *bind)
{
	struct key_counts *counts = counts_of_key(mw->keeps, bind->key);

	return counts && bind->number && RP_LOAD(&counts->binder) != SEVERAL &&
	       (int32_t)((uint32_t)RP_LOAD(&counts->word) - bind->number) >= 0;
}

/* Whether a region was certainly bound before a given bind. */
static int precedes(const struct rp_bound *bound, const struct rp_bind *bind)
{
	return bound->done < bind->serial ||
	       (bound->bind.binder == bind->binder && bound->bind.serial < bind->serial);
}

void rp_note_bound(struct rp_handle *mw, struct rp_handle *mr, int sure, struct rp_bind bind)
{
	struct rp_bound *new = NULL, *old = NULL;
	int late = 0;

	if (state_of(mw) != OPEN || mw->process != rp_process)
		return;
	if (mr) {
		/* If memory runs out, the region is never released. */
		new = PyMem_Malloc(sizeof(*new));
		RP_ADD(&mr->windows, 1);
		RP_ADD(&bind.binder->windows, 1);
		Py_INCREF((PyObject *)mr);
		RP_ADD(&bind.binder->users, 1);
	}
	RP_BEGIN(mw);
	for (struct rp_bound *b, **at = &mw->bound; (b = *at);) {
		late |= b->sure && b->bind.binder == bind.binder && b->bind.serial > bind.serial;
		if (sure && precedes(b, &bind)) {
			*at = b->next;
			b->next = old;
			old = b;
		} else {
			at = &b->next;
		}
	}
	if (new) {
		struct rp_bound **list = late ? &old : &mw->bound;

		*new = (struct rp_bound){ mr, *list, bind, rp_bind_clock(), sure };
		*list = new;
	}
	RP_END();
	rp_unbind(old);
}

/*
 * _unbind_invalidated(): release the regions that a window is no longer bound to because its key
 * was invalidated. Returns whether there were any.
 */
PyObject *rp_unbind_invalidated(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	struct rp_bound *old = NULL;
	int found;

	(void)unused;
	RP_BEGIN(h);
	for (struct rp_bound *b, **at = &h->bound; (b = *at);) {
		if (is_invalidated(h, &b->bind)) {
			*at = b->next;
			b->next = old;
			old = b;
		} else {
			at = &b->next;
		}
	}
	RP_END();
	found = old != NULL;
	rp_unbind(old);
	return PyBool_FromLong(found);
}
